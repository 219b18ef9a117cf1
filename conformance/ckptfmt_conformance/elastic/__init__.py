"""Training with the same bits on any number of processes: a reference trainer in torch alone.

Data-parallel training gives different bits on different numbers of processes for four reasons.
Gradients are summed in another order. The batch of a process has another shape. Random numbers
depend on the rank. Averages are taken over the samples of one process. `Trainer` fixes all four at
the start of a run, in a `Plan`: a number of logical workers, the shape of their microbatches, a
random-number stream for each worker and step, and one binary tree for all sums. Processes only
divide the logical workers among themselves: any number of processes from one to `Plan.workers`.

The code is small on purpose, for reading and for small models: each process holds the whole model,
and each microbatch ends with one sum over all processes. `torch.distributed` copies bytes (send,
receive, broadcast) and adds no numbers. So backend, algorithm and bucket size don't influence the
bits.

Not covered: another kind of processor, another version of torch, another number of threads per
process (call `pin_arithmetic`), optimizers that mix the elements of a tensor in their own order,
and tensor parallelism.

>>> import torch
>>> def loss_of(model, samples):
...     x = torch.tensor([[float(sample), 1.0] for sample in samples])
...     return (model(x) - 1).square().sum(), len(samples)
>>> plan = Plan(workers=8, microbatch=2, seed=7)
>>> _ = torch.manual_seed(0)  # the same first weights on every process
>>> model = torch.nn.Linear(2, 1)
>>> optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
>>> trainer = Trainer(model, optimizer, plan, loss_of)
>>> reports = [trainer.step() for _ in range(3)]
>>> [(report.step, report.samples) for report in reports]
[(1, range(0, 16)), (2, range(16, 32)), (3, range(32, 48))]

To continue later, on any number of processes, save model, optimizer and trainer (`state_dict`,
`load_state_dict`), and any other state changed at a step, such as a scheduler.
"""

from ckptfmt_conformance.elastic.arithmetic import grad_norm, pin_arithmetic
from ckptfmt_conformance.elastic.plan import Plan
from ckptfmt_conformance.elastic.scale import LossScale
from ckptfmt_conformance.elastic.trainer import StepReport, Trainer
from ckptfmt_conformance.elastic.tree import Reduction, TreeSum, WindowSum

__all__ = [
    "LossScale",
    "Plan",
    "Reduction",
    "StepReport",
    "Trainer",
    "TreeSum",
    "WindowSum",
    "grad_norm",
    "pin_arithmetic",
]
