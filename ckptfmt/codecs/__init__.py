"""The encodings of blocks, and the prediction of an optimizer's next state. Pure."""
