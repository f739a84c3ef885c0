"""The links of one optimizer step, each with its measure, its limit and its words.

A link's comparison gives one number, 0 for equal, with the sentence that a difference would be
told in; or the reason why it could not be made. Limits are for fp32: clean runs of every strategy
against `single` in a rehearsal, each under one engine at least, reach what stands beside a limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from toolkit.comparing.bisect import of_rows, of_saves, of_settings, of_tensors
from toolkit.comparing.bisect.pair import Pair, Seen, share_of, size_of
from toolkit.comparing.parity import GATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One link of the chain."""

    what: str
    compare: Callable[[Pair], Seen | str]
    limit: float = 0.0
    low_precision_limit: float | None = None
    """Under bf16 and fp16, where it is known without measuring."""

    unmeasured_limit: float | None = None
    """Under bf16 and fp16, where rounding moves it and how far could not be measured."""

    rounds: bool = True
    """Whether rounding moves it, so that its part is measured."""

    carries: bool = False
    """Whether what earlier steps left in the optimizer shows in it."""

    drift: float = 0.0
    """How many times what earlier steps left between the weights is no difference here."""

    shown: Callable[[float], str] = size_of


BEFORE: Final = Link(
    # As gated at the end of a comparison: clean runs reach 5.6e-5.
    what="weights before the step",
    compare=of_tensors.weights_before,
    limit=GATES["no"].weights,
    low_precision_limit=GATES["bf16"].weights,
    rounds=False,
    shown=share_of,
)
"""Of a later step, which the second run begins with the weights of the first."""


LINKS: Final = (
    Link(what="trained parameters", compare=of_tensors.trained_parameters, rounds=False),
    # All load one checkpoint: 0.
    Link(what="initial weights", compare=of_tensors.initial_weights, rounds=False),
    BEFORE,
    Link(what="batch", compare=of_rows.batch, rounds=False),
    # 0, in other micro-batches too; a GPU's kernels may sum another width in another order.
    # Autocast moves small models by 7e-5 under fp16 and 9e-4 under bf16.
    Link(
        what="loss of the rows",
        compare=of_rows.row_losses,
        limit=2e-5,
        unmeasured_limit=1e-2,
    ),
    # 2.1e-7; under bf16 FSDP2 rounds what flows back into its loss.
    Link(
        what="loss weighting",
        compare=of_rows.loss_weighting,
        limit=1e-4,
        low_precision_limit=1e-2,
        rounds=False,
        shown=share_of,
    ),
    # 1.4e-7; rounded to bf16 on the wire it is 1e-3. Autocast: 1.1e-3 and 9e-3.
    Link(
        what="gradients",
        compare=of_tensors.gradients,
        limit=1e-5,
        unmeasured_limit=5e-2,
        shown=share_of,
    ),
    # 4e-6: the norm is summed in fp32.
    Link(
        what="clipping norm",
        compare=of_settings.clipping,
        limit=1e-4,
        low_precision_limit=1e-2,
        shown=share_of,
    ),
    Link(what="learning rate", compare=of_settings.learning_rate, limit=1e-9, rounds=False),
    Link(what="optimizer settings", compare=of_settings.settings, rounds=False),
    # 1.1e-5: Adam's first step divides a gradient by its own size, tiny ones included. Autocast:
    # 3e-2 and 0.11. With states of their own in step 6: three times as far as the weights before.
    Link(
        what="update",
        compare=of_tensors.update,
        limit=5e-4,
        unmeasured_limit=0.5,
        carries=True,
        drift=10.0,
        shown=share_of,
    ),
    Link(
        what="learning rate of the next step",
        compare=of_settings.next_learning_rate,
        limit=1e-9,
        rounds=False,
    ),
    # 4.8e-7; under bf16 FSDP2 rounds what it returns, 1e-2.
    Link(
        what="loss of the next step",
        compare=of_settings.next_loss,
        limit=1e-5,
        low_precision_limit=7e-2,
        carries=True,
    ),
    # What is saved is read again and compared before it counts as saved: 0.
    Link(what="saved weights", compare=of_saves.saved_weights, rounds=False),
)
"""In the order of cause and effect."""
