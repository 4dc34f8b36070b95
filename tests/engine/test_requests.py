"""One request: what it draws, when it ends, what it says, and what it costs nobody else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from byte_tokenizer import byte_tokenizer
from dsv4_tierd.engine import messages as m
from engine_probe import Probe, make_hostile
from small_models import text
from world import Answer, World, ids_bytes

PROMPT = text(600, 300)


@pytest.fixture
def world(models) -> World:
    """A world whose 512 words have a text: DeepSeek's first ones, special tokens and bytes."""
    made = models("SCH", 16).world(max_batch=4)
    make_hostile(made, 41)
    made.engine.tokenizer = byte_tokenizer()
    return made


@pytest.fixture(scope="module")
def plain(models) -> Answer:
    """What an unrestricted greedy run of 24 tokens answers."""
    made = models("SCH", 16).world(max_batch=4)
    made.engine.tokenizer = byte_tokenizer()
    answer = made.generate(made.open(), PROMPT, 24)
    assert len(set(answer.token_ids)) > 12
    return answer


def submit(world: World, session: str, **fields: object) -> Answer:
    """Send a Submit as the daemon would; the answer fills as the world steps."""
    name = f"r{len(world.answers)}"
    world.answers[name] = Answer()
    defaults = {"append_ids": b"", "max_tokens": 4, "sampling": m.Sampling(ignore_eos=True)}
    message = m.Submit(request_id=name, session_id=session, **(defaults | fields))
    world.verbs.handle(message)
    return world.answers[name]


def test_length(world, plain) -> None:
    """It ends after max_tokens tokens, and says so; prompt and answer are counted."""
    session = world.open()
    answer = world.generate(session, PROMPT, 24)
    assert answer.token_ids == plain.token_ids and answer.done.finish_reason == "length"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (300, 24)
    assert (usage.computed_tokens, usage.replayed_tokens) == (300, 0)
    assert world.tokens(session) == PROMPT + plain.token_ids
    world.settle()


def test_stop_token_ids(world, plain) -> None:
    """A stop token ends the answer, belongs to its ids, and has no text."""
    stop = plain.token_ids[7]
    at = plain.token_ids.index(stop)
    answer = world.generate(world.open(), PROMPT, 24, stop_token_ids=(511, stop))
    assert answer.done.finish_reason == "stop" and answer.done.stop_sequence is None
    assert answer.token_ids == plain.token_ids[: at + 1]
    assert answer.text == byte_tokenizer().decode(plain.token_ids[:at])
    world.settle()


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos(world, plain, ignore_eos) -> None:
    """The end-of-sentence token ends an answer unless it is told to go on."""
    eos = plain.token_ids[5]
    world.engine.options = replace(world.engine.options, eos_token_ids=(eos,))
    answer = world.generate(world.open(), PROMPT, 24, ignore_eos=ignore_eos)
    if ignore_eos:
        assert answer.token_ids == plain.token_ids and answer.text == plain.text
    else:
        assert answer.token_ids == plain.token_ids[: plain.token_ids.index(eos) + 1]
        assert answer.done.finish_reason == "stop"


def test_stop_strings(world, plain) -> None:
    """A stop string across tokens ends the answer; its text stops short of it."""
    text_of_it = plain.text
    stop = text_of_it[len(text_of_it) // 2 :][:3]
    session = world.open()
    answer = world.generate(session, PROMPT, 24, stop=(stop,))
    assert answer.done.finish_reason == "stop" and answer.done.stop_sequence == stop
    assert answer.text == text_of_it[: text_of_it.index(stop)]
    assert answer.token_ids == plain.token_ids[: len(answer.token_ids)]
    assert world.tokens(session) == PROMPT + answer.token_ids, "what was drawn is remembered"


def test_logprobs(world) -> None:
    """Log probabilities are those of the logits that the engine computed."""
    probe = Probe(world)
    name = world.submit(world.open(), PROMPT, 6, logprobs=3, temperature=0.9, seed=4)
    [answer] = world.run(name)
    assert [entry.token_id for entry in answer.logprobs] == answer.token_ids
    for position, entry in enumerate(answer.logprobs, len(PROMPT) - 1):
        expected = torch.log_softmax(probe.rows[name][position], 0)
        assert math.isclose(entry.logprob, float(expected[entry.token_id]), abs_tol=1e-5)
        assert [i for i, _ in entry.top] == expected.topk(3).indices.tolist()


def test_sampling_is_repeatable(models, world) -> None:
    """The same seed answers the same in another world, in company, and step by step."""
    settings = {"temperature": 1.2, "seed": 77, "top_p": 0.95}
    first = world.generate(world.open(), PROMPT, 16, **settings)
    other = models("SCH", 16).world(max_batch=4, tiering="resident")
    for i in range(3):
        other.submit(other.open(), text(610 + i, 50), 30, temperature=1.0, seed=i)
    session = other.open()
    parts = other.generate(session, PROMPT, 7, **settings).token_ids
    parts += other.generate(session, [], 9, **settings).token_ids
    assert first.token_ids == parts
    assert world.generate(world.open(), PROMPT, 16, **settings | {"seed": 78}).token_ids != parts


def test_without_credit_it_waits(world, plain) -> None:
    """A client that does not read gets no more than its credit; nobody else waits for it."""
    slow = submit(world, world.open(), append_ids=ids_bytes(PROMPT), max_tokens=24, credit=3)
    other = world.submit(world.open(), text(620, 40), 30)
    world.run(other)
    assert slow.token_ids == plain.token_ids[:3]
    assert not world.step(), "a parked request is no work"
    world.verbs.handle(m.Credit(request_id="r0", tokens=2))
    while world.step():
        pass
    assert slow.token_ids == plain.token_ids[:5]
    world.verbs.handle(m.Credit(request_id="r0", tokens=100))
    world.run("r0")
    assert slow.token_ids == plain.token_ids
    world.settle()


def test_parked_requests_can_be_cancelled(world, plain) -> None:
    """A cancel ends a request that waits for credit; late credit for it is harmless."""
    session = world.open()
    slow = submit(world, session, append_ids=ids_bytes(PROMPT), max_tokens=24, credit=2)
    world.run_until(lambda: len(slow.token_ids) == 2)
    world.verbs.handle(m.Cancel(request_id="r0"))
    world.verbs.handle(m.Credit(request_id="r0", tokens=5))
    assert slow.done.finish_reason == "cancelled"
    assert world.generate(session, [], 22).token_ids == plain.token_ids[2:]
    world.settle()


def test_append_then_generate(world, plain) -> None:
    """An append computes all words but the last; generating later costs that one alone."""
    session = world.open()
    appended = world.run(world.submit(session, PROMPT))[0]
    assert (appended.token_ids, appended.done.finish_reason) == ([], "length")
    assert (appended.usage.computed_tokens, appended.usage.completion_tokens) == (299, 0)
    answer = world.generate(session, [], 24)
    assert answer.usage.computed_tokens == 1
    assert answer.token_ids == plain.token_ids
    world.settle()


@pytest.mark.parametrize("count", [0, 1])
def test_appending_next_to_nothing(world, count) -> None:
    """An append of one word, or of none to a session that has one, ends at once."""
    session = world.open([5])
    [answer] = world.run(world.submit(session, [6] * count))
    assert answer.done.finish_reason == "length" and answer.usage.computed_tokens == count
    assert len(world.generate(session, [], 3).token_ids) == 3
    world.settle()


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"append_ids": b"\0" * 5}, "invalid_token_ids"),
        ({"append_ids": ids_bytes([512])}, "invalid_token_ids"),
        ({"append_ids": ids_bytes([3, -1])}, "invalid_token_ids"),
        ({"max_tokens": 4093}, "context_length_exceeded"),
        ({"expected_tokens": 3}, "precondition_failed"),
        ({"session_id": "nobody"}, "session_not_found"),
    ],
)
def test_refusals_change_nothing(world, fields, code) -> None:
    """A request that cannot be is refused with its code, and the session is as it was."""
    session, fields = world.open([1, 2, 3, 4]), dict(fields)
    answer = submit(world, fields.pop("session_id", session), **fields)
    assert answer.failed is not None and answer.failed.code == code
    assert world.tokens(session) == [1, 2, 3, 4] and not world.engine.busy
    good = submit(world, session, expected_tokens=4)
    world.run()
    assert len(good.token_ids) == 4
    world.settle()


def test_one_request_at_a_time(world) -> None:
    """A second request to a busy session is refused; the first is not disturbed."""
    session = world.open()
    first = submit(world, session, append_ids=ids_bytes(PROMPT))
    world.step()
    second = submit(world, session, append_ids=ids_bytes([1]))
    assert second.failed is not None and second.failed.code == "session_busy"
    world.run("r0")
    assert len(first.token_ids) == 4


def test_empty_session(world) -> None:
    """A session without a word has nothing to answer to."""
    answer = submit(world, world.open())
    assert answer.failed is not None and answer.failed.code == "invalid_request"


def test_ephemeral_sessions_leave_only_pages(world) -> None:
    """A request that brought its own session takes it along; what it computed stays cached."""
    answer = submit(world, world.open(), append_ids=ids_bytes(PROMPT), ephemeral=True)
    world.run("r0")
    assert answer.done is not None and not world.engine.sessions and not len(world.tiers.idle)
    again = world.generate(world.open(), PROMPT, 4)
    assert again.usage.device_tokens == 256 and again.token_ids == answer.token_ids
    world.settle()


def test_progress_is_told(models) -> None:
    """Of a long prefill every chunk but the last tells how far it is."""
    world = models("SCH", 16).world(chunk_tokens=100)
    told: list[m.Progress] = []
    send = world.engine.send
    world.engine.send = lambda message: (
        told.append(message) if isinstance(message, m.Progress) else send(message)
    )
    world.run(world.submit(world.open(), PROMPT, 1))
    assert [(each.done, each.total) for each in told] == [(100, 300), (200, 300), (256, 300)]


@pytest.mark.parametrize("call", ["begin", "advance"])
def test_a_chunk_that_does_not_fit_the_device_fails_alone(models, call: str) -> None:
    """Out of memory in a prefill is that request's 503; the engine goes on, nothing is lost."""
    world = models("SCH", 16).world(chunk_tokens=100)
    session, prompt = world.open(), text(8, 350)
    runner, failing = world.engine.runner, [True]
    begin, advance = runner.begin, runner.advance

    def out_of_memory(at, first: int) -> None:
        if call == at and first >= 200 and failing:
            failing.clear()
            raise torch.OutOfMemoryError

    def beginning(seq, stop):
        chunk = begin(seq, stop)
        out_of_memory("begin", seq.position)
        return chunk

    def advancing(chunk, layers):
        out_of_memory("advance", chunk.first)
        return advance(chunk, layers)

    runner.begin, runner.advance = beginning, advancing
    failed = world.generate(session, prompt, 4).failed
    assert failed is not None
    assert (failed.code, failed.retry_after_s) == ("device_out_of_memory", 10.0)
    again, fresh = world.generate(session, prompt, 4), world.generate(world.open(), prompt, 4)
    assert again.token_ids == fresh.token_ids != []
    world.settle()
