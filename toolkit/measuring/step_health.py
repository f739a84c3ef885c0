"""What is known of one step: a beat by all ranks together, and what each knows by itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHealth:
    """What all ranks together said of one step; the same on each of them."""

    step: int
    loss_is_finite: bool
    """On every rank."""

    norm_is_finite: bool
    """On every rank; of a step that fp16 skipped it need not be."""

    skipped: bool
    """Whether fp16 left out the update."""

    grad_norm: float | None
    """The largest that a rank saw."""

    of_a_shard: bool = False
    """Whether each rank saw its own shard's alone: the whole norm is larger, up to the root of the
    number of ranks."""

    same_order: bool
    """Whether all ranks have been given the same rows in the same order so far."""

    busiest: int
    """The rank that worked longest outside of collectives."""

    busiest_seconds: float
    idlest_seconds: float
    """Of the rank that worked shortest."""

    seconds: float
    """Of the whole step, on the rank that needed longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """What one rank knows of a step by itself, read when something is wrong with it."""

    rank: int
    loss: float
    grad_norm: float | None
    order: int
    sample_ids: list[int] | None
