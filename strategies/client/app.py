"""The ClientApp that takes part in every method, made from a function that loads a site."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from hashlib import sha256
from logging import ERROR
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore import log

from kindred.errors import Reportable
from kindred.lazy import lazy
from kindred.messages import (
    AFTER_TRAINING,
    ATTEMPT,
    CLIENT_ID,
    CONFIG,
    IDENTITY_QUERY,
    KEEP_FROM,
    METHOD,
    METHODS,
    METRICS,
    NETWORK,
    NUM_CLASSES,
    NUM_EXAMPLES,
    NUM_PUBLIC,
    NUM_TEST_EXAMPLES,
    OBJECTIVE,
    PROBE,
    PROBLEM,
    PUBLIC_SET,
    REFUSAL_QUERY,
    REPORT_WEIGHTS,
    RUN,
    SERVER_ROUND,
    SHARE_MODEL,
    TASK,
    VALIDATE_ONLY,
    VERSION_KEY,
    check,
    first_line,
    read_record,
    records_of,
)
from kindred.packing import unpacking
from kindred.registry import REGISTRY
from kindred.settings import (
    DEVICE,
    LOCAL_EPOCHS,
    LOCAL_STEPS,
    MAX_LOCAL_EPOCHS,
    SHADOW_LOCAL,
    TRAINING as TRAINING_SETTINGS,
)
from kindred.versions import VERSION, mismatch

from .evaluation import evaluation_mode
from .journal import EVALUATION, FAULT, INTRODUCTION, JOURNAL, NOTICE, TRAINING, append, describe, recorded
from .local_training import LocalTraining
from .models import MODELS
from .shadow import comparison, keep_at_the_end, train_alone
from .site import (
    STATE_DIR,
    LoadSite,
    Site,
    client_id,
    module_of,
    only_validates,
    site_of,
    true_or_false,
)
from .state import ClientState, client_folder
from .training import pick_device
from .validation import NEVER_TRAINS, validation
from .visit import Visit

if TYPE_CHECKING:
    import torch
else:
    torch = lazy("torch")


def make_client_app(load_site: LoadSite) -> ClientApp:
    """Make a ClientApp that takes part in every registered method.

    Parameters
    ----------
    load_site : callable
        Given Flower's Context of a client, returns the client's `Site`. Called once per client and process.

    Returns
    -------
    ClientApp
    """
    app = ClientApp()

    def work(message: Message, context: Context, task: str) -> Message:
        visit = _visit(load_site, message, context)
        with visit.state.locked() if visit.is_site else contextlib.nullcontext():
            if visit.is_site:
                visit.state.admit(context.run_id, task, _fixed_settings(visit.config))
            content = getattr(_client_half(visit), task)(visit)
            if SHADOW_LOCAL.read(visit.config) and PROBE not in visit.config:
                if task == "train":
                    train_alone(visit)
                else:
                    keep_at_the_end(visit)
                content[METRICS].update(comparison(visit))
            if visit.is_site and visit.is_last and PROBE not in visit.config and (task == "evaluate" or _ends(visit)):
                visit.state.finish()
        content[METRICS].update(visit.compute)
        return Message(content, reply_to=message)

    @app.query(IDENTITY_QUERY.partition(".")[2])
    @recorded(INTRODUCTION)
    def identity(message: Message, context: Context) -> Message:
        asked = dict(records_of(message.content, ConfigRecord)[0]) if message.content.config_records else {}
        is_site = STATE_DIR in context.node_config
        about = introduction_of(load_site, context, asked.get(VERSION_KEY), hides=is_site)
        if PROBLEM in about and is_site:  # a site's operator can fix it
            log(ERROR, "kindred: this site takes no part: %s", first_line(str(about[PROBLEM])))
        return Message(RecordDict({CONFIG: ConfigRecord(about)}), reply_to=message)

    @app.query(REFUSAL_QUERY.partition(".")[2])
    @recorded(NOTICE)
    def refusal(message: Message, context: Context) -> Message:
        (config,) = records_of(message.content, ConfigRecord)
        log(ERROR, "kindred: the server says of this site: %s", first_line(str(config[PROBLEM])))
        return Message(RecordDict(), reply_to=message)

    @app.train()
    @unpacking
    @recorded(TRAINING)
    def train(message: Message, context: Context) -> Message:
        if only_validates(context.node_config):
            log(ERROR, "kindred: the server asks this site to train: %s", NEVER_TRAINS)
            raise ValueError(Reportable(NEVER_TRAINS))
        return work(message, context, "train")

    @app.evaluate()
    @unpacking
    @recorded(EVALUATION)
    def evaluate(message: Message, context: Context) -> Message:
        if only_validates(context.node_config):
            return Message(validation(_visit(load_site, message, context)), reply_to=message)
        return work(message, context, "evaluate")

    return app


def introduction_of(
    load_site: LoadSite, context: Context, server_version: object = VERSION, *, hides: bool = False
) -> dict[str, Any]:
    """Return a client's introduction: its id, number of samples, methods and network (see `messages`).

    With `hides`, what is returned has of an error only what the server may learn, see `journal.describe`.
    """
    who: dict[str, Any] = {CLIENT_ID: client_id(context)}
    about: dict[str, Any] = {METHODS: list(REGISTRY), VERSION_KEY: VERSION}
    try:
        if validates := only_validates(context.node_config):
            who[VALIDATE_ONLY] = True
        if differs := mismatch(server_version, "the server", "this client"):
            return {**who, PROBLEM: differs}
        site = site_of(load_site, context, pick_device(str(context.run_config.get("device", "auto"))))
        about |= {
            NUM_EXAMPLES: len(site.train[1]),
            NUM_CLASSES: _num_outputs(site, *(("test",) if validates else ("train", "test", "validation"))),
            OBJECTIVE: site.objective.name,
            SHARE_MODEL: true_or_false(context.node_config, SHARE_MODEL, True),
        }
        true_or_false(context.node_config, REPORT_WEIGHTS, False)
        if validates:
            about[NUM_TEST_EXAMPLES] = len(site.test[1])
        if "model" in site.about:
            about[NETWORK] = site.about["model"]
        if TASK in site.about:
            about[TASK] = sha256(site.about[TASK].encode()).hexdigest()[:16]
        if site.public is not None:
            about |= {PUBLIC_SET: site.fingerprint, NUM_PUBLIC: len(site.public)}
    except Exception as error:  # the client's id is known all the same
        reason, kept = describe(error, context.node_config if hides else {})
        if FAULT in kept and (journal := os.environ.get(JOURNAL)):
            append(journal, {"kind": FAULT, **kept})
        return {**who, PROBLEM: reason}
    return who | about


def _client_half(visit: Visit) -> Any:
    method = REGISTRY.get(str(visit.config.get(METHOD)))
    return (method.client if method else None) or LocalTraining


def _ends(visit: Visit) -> bool:
    """Return whether the last message to train is a client's last one: no closing evaluation follows it."""
    return visit.strategy is not None and visit.strategy.personal in AFTER_TRAINING


def _fixed_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings in a message that are the same in every round, as texts."""
    method = REGISTRY.get(str(config.get(METHOD)))
    drawn = {LOCAL_EPOCHS.key} if MAX_LOCAL_EPOCHS.key in config else set()
    if not config.get(LOCAL_STEPS.key):
        drawn.add(LOCAL_STEPS.key)  # a round of PerFed-CKT without training
    keys = [each.key for each in (*TRAINING_SETTINGS, *(method.settings if method else ()))]
    return {key: repr(config[key]) for key in keys if key in config and key not in drawn}


def _visit(load_site: LoadSite, message: Message, context: Context) -> Visit:
    configs = records_of(message.content, ConfigRecord)
    config: dict[str, Any] = dict(configs[0]) if configs else {}
    folder = context.node_config.get(STATE_DIR)
    records = records_of(message.content, ArrayRecord)
    check("number of records with arrays in the message", len(records), len(records) == 1, "1")
    device = pick_device(str(DEVICE.read(config)))
    client = client_id(context)
    run, server_round = str(config.get(RUN, context.run_id)), int(config.get(SERVER_ROUND, 0))
    check(RUN, run, run.isascii() and run.isdecimal(), "a number")  # it becomes part of a path
    if folder is not None and not client_folder(int(run), client, str(folder)).exists():
        run = str(context.run_id)  # nothing to continue here: the message is of a run that was resumed
    repeats = ATTEMPT in config  # the server says which state a round starts from
    evaluates = message.metadata.message_type == MessageType.EVALUATE
    state = ClientState(
        int(run),
        client,
        None if folder is None else str(folder),
        server_round=server_round,
        before=server_round + evaluates if repeats else None,
        keep_from=config.get(KEEP_FROM),
        attempt=int(config.get(ATTEMPT, 0)),
        method=str(config.get(METHOD, "")),
    )
    return Visit(
        client, site_of(load_site, context, device), config, read_record(records[0]), device, state, context.node_config
    )


def _num_outputs(site: Site, *kinds: str) -> int:
    """Return the number of outputs of a site's network; raise ValueError if a sample's target is not one of them.

    `kinds` are the attributes with the samples that it uses. The number is 0 without samples of the first kind.
    """
    x, y = getattr(site, kinds[0])
    if not len(y):
        return 0
    # Made now: its first weights are drawn, and no message may depend on when.
    network = module_of(site.model, x.device)
    outputs = _outputs_of(network, x.device, x.dtype, x.shape[1:])
    num_outputs = site.objective.predictions(outputs).shape[1]
    for kind in kinds:
        try:
            if samples := getattr(site, kind):
                site.objective.check(samples[1].cpu().numpy(), num_outputs)
        except ValueError as error:
            raise ValueError(f"{kind}: {error}") from None
    return num_outputs


@functools.lru_cache(maxsize=len(MODELS))  # clients of a simulation share one network
def _outputs_of(
    network: torch.nn.Module, device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    with evaluation_mode(network), torch.inference_mode():
        return network(torch.zeros(1, *shape, dtype=dtype, device=device)).float()
