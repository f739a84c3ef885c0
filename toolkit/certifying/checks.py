"""The checks of a certificate, by group: a check is one entry here and its judge."""

from __future__ import annotations

from typing import Final

from toolkit.certifying import (
    against_one,
    read_rows,
    repeated,
    resumed,
    rules,
    saved,
    schedule,
    trained_parameters,
    trained_tokens,
)
from toolkit.certifying.subject import Check, of_any_rows, of_rows

READ: Final = "Before it runs"
TOKENS: Final = "What is trained"
PARAMETERS: Final = "Who is trained"
ROWS: Final = "Rows"
ONE: Final = "One against N"
LOG: Final = "Schedule and log"
SAVED: Final = "Saved"
RESUMED: Final = "Resumed"
TWICE: Final = "Evaluated and repeated"

GROUPS: Final = {
    **{"rules": READ, "tokens": TOKENS, "parameters": PARAMETERS, "rows": ROWS},
    **{"one": ONE, "log": LOG, "saved": SAVED, "resumed": RESUMED, "repeated": TWICE},
}
"""By the names that --only takes."""

AGAINST_ONE: Final = {ROWS, ONE, LOG}
"""Groups that need the run of one process."""

PLACES: Final = {
    **{TOKENS: "loader", PARAMETERS: "optimizer", ROWS: "loader", ONE: "backward"},
    **{LOG: "schedule", RESUMED: "load", TWICE: "evaluation"},
}
"""What in a script is looked at first where a check of a group is broken."""

PREPARED: Final = Check(name="prepared", group=PARAMETERS, judge=trained_parameters.is_prepared)

CHECKS: Final = (
    Check(name="rules", group=READ, judge=rules.read),
    Check(name="tokens to learn", group=TOKENS, judge=of_rows(trained_tokens.some_tokens)),
    Check(name="stop token", group=TOKENS, judge=of_rows(trained_tokens.stop_token)),
    Check(name="token of beginning", group=TOKENS, judge=of_any_rows(trained_tokens.bos_once)),
    Check(name="padding", group=TOKENS, judge=of_rows(trained_tokens.padding)),
    Check(
        name="attention mask", group=TOKENS, judge=of_rows(trained_tokens.attention, labelled=False)
    ),
    Check(name="label shift", group=TOKENS, judge=of_rows(trained_tokens.shifted)),
    Check(name="cut rows", group=TOKENS, judge=of_rows(trained_tokens.cut_rows, labelled=False)),
    Check(name="new tokens", group=TOKENS, judge=trained_tokens.new_tokens),
    Check(name="packed rows", group=TOKENS, judge=trained_tokens.packed_rows),
    Check(name="vocabulary", group=TOKENS, judge=trained_tokens.in_vocabulary),
    PREPARED,
    Check(name="attested", group=PARAMETERS, judge=trained_parameters.attested, place="prepare"),
    Check(name="trained parameters", group=PARAMETERS, judge=trained_parameters.trained_move),
    Check(name="frozen parameters", group=PARAMETERS, judge=trained_parameters.frozen_stay),
    Check(name="optimizer", group=PARAMETERS, judge=trained_parameters.optimizer_has_all),
    Check(name="empty parameters", group=PARAMETERS, judge=trained_parameters.none_empty),
    Check(name="one model", group=PARAMETERS, judge=trained_parameters.one_model, place="backward"),
    Check(
        name="training mode",
        group=PARAMETERS,
        judge=trained_parameters.training_mode,
        place="forward",
    ),
    Check(name="spread of the norm", group=PARAMETERS, judge=trained_parameters.spread_norm),
    Check(name="same data", group=ROWS, judge=read_rows.same_data),
    Check(name="same draws", group=ROWS, judge=read_rows.same_draws),
    Check(name="each row once", group=ROWS, judge=read_rows.each_once),
    Check(name="workers' seeds", group=ROWS, judge=read_rows.workers_apart),
    Check(name="new order", group=ROWS, judge=read_rows.new_order),
    Check(name="first step", group=ONE, judge=against_one.same_step),
    Check(name="size of the loss", group=ONE, judge=against_one.size_of_loss),
    Check(name="weight of a token", group=ONE, judge=against_one.mean_of_means),
    Check(name="learning rate", group=LOG, judge=schedule.rates),
    Check(name="logged loss", group=LOG, judge=schedule.logged_loss),
    Check(name="clipping", group=LOG, judge=schedule.clipping, place="clip"),
    Check(name="logged epoch", group=LOG, judge=schedule.epochs),
    Check(name="saves", group=SAVED, judge=saved.saves),
    Check(name="folders load", group=SAVED, judge=saved.loads),
    Check(name="saved weights", group=SAVED, judge=saved.weights),
    Check(name="a model at the end", group=SAVED, judge=saved.a_model),
    Check(name="resumes", group=RESUMED, judge=resumed.resumes),
    Check(name="state that is loaded", group=RESUMED, judge=resumed.loaded),
    Check(name="steps after it", group=RESUMED, judge=resumed.goes_on),
    Check(name="second save", group=RESUMED, judge=resumed.second_save),
    Check(name="cut-off checkpoints", group=RESUMED, judge=resumed.cut_off),
    Check(name="trace of an evaluation", group=TWICE, judge=repeated.leaves_no_trace),
    Check(name="value of an evaluation", group=TWICE, judge=repeated.gives_the_same),
    Check(name="held-out rows", group=TWICE, judge=repeated.is_held_out),
    Check(name="twice the same", group=TWICE, judge=repeated.twice_the_same),
)
