"""AdamW of a whole stack in one pass, from gradients where they lie to parameters.

Embeddings, heads, norm layers and biases get it under every member. Gathering the gradient, a direction and a descent
would be three passes: 48 bytes an entry, where this reads and writes 28.
"""

from torch import Tensor

from layerwise.optim.cuda.elementwise import corrections_
from layerwise.optim.cuda.linalg.fp16 import Half
from layerwise.optim.cuda.pieces import StackPieces, Tables
from layerwise.optim.elementwise import AdamRule
from layerwise.optim.step.update import Executor, Part


def takes(executor: Executor, own: StackPieces) -> bool:
    """Whether a stack's step, in an executor that `is_plain`, is AdamW's and nothing else."""
    return isinstance(own.stack.rule, AdamRule) and not executor.momentum_of(own.stack)


def is_gathered(grad: Tensor | Half) -> bool:
    """Whether a stack's gradient was gathered; what stands for one that is read where it lies has no axes of a stack.

    >>> is_gathered(Tensor(2, 3, 0)), is_gathered(Tensor(0))
    (True, False)
    """
    return len(grad.shape) == 3


def step_(part: Part, tables: Tables) -> None:
    """The step of a stack whose gradient was not gathered."""
    stack, rule, device_step = part.stack, part.stack.rule, part.context.device_step
    assert isinstance(rule, AdamRule)
    own, state, finite = tables.pieces[id(stack)], stack.state, device_step.all_finite
    betas = part.context.options.get("betas", rule.betas)
    state["m"], state["v"] = own.laid_out(state["m"]), own.laid_out(state["v"])
    corrections = corrections_(state["steps"], betas[0], betas[1], finite)
    eps = rule.eps * part.context.unit
    tables.adamw_(own, (state["m"], state["v"]), corrections, device_step.scale, betas, eps, finite)
