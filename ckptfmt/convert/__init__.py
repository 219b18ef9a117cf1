"""Between ckptfmt's checkpoints and those of others: torch.save, torch.distributed.checkpoint, Hugging Face.

A source of any kind becomes a `Content`, which is what a checkpoint holds; from this, a target of any kind is written.
Tensors pass in chunks: no more than a few are in memory, whatever the size of the checkpoint.
"""
