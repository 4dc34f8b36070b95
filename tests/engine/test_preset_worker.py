"""The engine's process with a model that is no folder."""

from __future__ import annotations

import socket
import subprocess
import sys

import msgspec
import pytest
import torch

from dsv4_tierd.engine.build import Layouts, row_kind, store_identity
from dsv4_tierd.engine.config import EngineConfig
from dsv4_tierd.engine.messages import LoadProgress, Ready, ToDaemon
from dsv4_tierd.engine.model.config import load_config
from dsv4_tierd.engine.model.weights import free_bytes
from dsv4_tierd.engine.worker import LENGTH

SMALL = (
    "preset:flash-mini?layers=SCH&hidden_size=64&vocab_size=512&heads=4&head_dim=80&rope_dim=16"
    "&q_lora=32&o_groups=2&o_lora=16&experts=4&experts_per_token=2&moe_inter=64"
    "&index_heads=16&index_dim=32&index_topk=16"
)


def started(model: str) -> tuple[list[object], int, str]:
    """Messages until Ready or the end, exit code and log of a worker that is told to end then."""
    config = EngineConfig(model=model, device="cpu", device_budget_bytes=64 << 20).to_json()
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "dsv4_tierd.engine.worker", "--socket-fd"]
    process = subprocess.Popen(
        [*command, str(theirs.fileno())],
        pass_fds=(theirs.fileno(),),
        stderr=subprocess.PIPE,
        text=True,
    )
    theirs.close()
    ours.settimeout(60)
    frame = config.encode()
    messages: list[object] = []
    with ours, ours.makefile("rb") as stream:
        ours.sendall(LENGTH.pack(len(frame)) + frame)
        while size := stream.read(LENGTH.size):
            body = stream.read(LENGTH.unpack(size)[0])
            messages.append(msgspec.msgpack.decode(body, type=ToDaemon))
            if isinstance(messages[-1], Ready):
                break
    _, log = process.communicate(timeout=60)
    return messages, process.returncode, log


def test_a_preset_is_served() -> None:
    """It is ready under its own name, by token ids alone where its vocabulary is nobody's."""
    messages, _, log = started(SMALL)
    ready = messages[-1]
    assert isinstance(ready, Ready), log
    assert (ready.model_id, ready.vocab_size, ready.has_tokenizer) == ("flash-mini", 512, False)


def test_the_identity_is_the_recipe() -> None:
    """Any two starts have one identity, so their stores meet; another seed has another."""

    def identity(model: str) -> bytes:
        sizes = load_config(model)
        config = EngineConfig(model=model, device="cpu")
        return store_identity(config, sizes, Layouts.of(sizes, row_kind("fp32"))).digest

    assert identity(SMALL) == identity(SMALL + "&seed=0") != identity(SMALL + "&seed=1")


def test_the_whole_preset_on_a_small_machine() -> None:
    """Refused before anything is made, with what it would need."""
    if free_bytes(torch.device("cpu")) > 100 << 30:
        pytest.skip("it fits here: there is nothing to refuse")
    messages, code, log = started("preset:flash-mini")
    assert code == 1 and all(isinstance(message, LoadProgress) for message in messages)
    assert "preset:flash-mini needs 93.7 GiB as float32 on cpu; " in log
