"""How blocks are encoded, and how an optimizer's next state is predicted. Pure."""
