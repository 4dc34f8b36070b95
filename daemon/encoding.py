"""DeepSeek-V4's chat encoding, by the official package: messages to pieces of a prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import deepseek_recipe as recipe

from dsv4_tierd.daemon.ledger import Turn
from dsv4_tierd.daemon.tokenize import Piece
from dsv4_tierd.tiering.errors import InvalidRequest

ENCODING_VERSION = f"deepseek-recipe {recipe.__version__}"
_MODEL = "served"
_encoding = recipe.DeepseekV4Encoding()
BOS = recipe.SpecialToken.Bos.default_str()
EOS = recipe.SpecialToken.Eos.default_str()
ASSISTANT = recipe.SpecialToken.Assistant.default_str()
THINK_START = recipe.SpecialToken.ThinkingStart.default_str()
THINK_END = recipe.SpecialToken.ThinkingEnd.default_str()


@dataclass(frozen=True, slots=True)
class Chat:
    """One chat request, converted. ``request`` makes the answer's parser and chunks."""

    pieces: tuple[Piece, ...]
    request: recipe.ConversationRequest
    thinking: bool


def encode_chat(body: dict[str, Any], *, thinking_default: bool) -> Chat:
    """The whole prompt of an OpenAI chat body. Raises InvalidRequest."""
    options = recipe.ConversionOptions(
        default_thinking_mode=thinking_default
    ).with_model_versions_by_name({_MODEL: recipe.ModelVersion.DeepseekV4Pro})
    if any(_reads_more_than_text(message) for message in body["messages"]):
        raise InvalidRequest("this model reads text only: no images, no files", param="messages")
    sent = {**body, "model": _MODEL, "messages": [_plain_role(m) for m in body["messages"]]}
    try:
        text = json.dumps(sent, allow_nan=False)
        request = recipe.ChatCompletionRequest(text).convert(options)
    except recipe.ConversionError as error:
        raise InvalidRequest(_conversion_message(error), param="messages") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(str(error), param="messages") from error
    rendered = _encoding.render_conversation(request.conversation)
    return Chat(_pieces(rendered), request, request.conversation.thinking_mode)


def _reads_more_than_text(message: Any) -> bool:
    """Whether it has parts in whose place the encoding would only say that it cannot read them."""
    parts = message.get("content") if isinstance(message, dict) else None
    return isinstance(parts, list) and any(
        isinstance(part, dict) and part.get("type") in ("image_url", "file") for part in parts
    )


def _plain_role(message: Any) -> Any:
    """``developer`` is OpenAI's later name for ``system``."""
    if isinstance(message, dict) and message.get("role") == "developer":
        return {**message, "role": "system"}
    return message


def _conversion_message(error: recipe.ConversionError) -> str:
    try:
        return str(json.loads(error.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error)


def _pieces(rendered: recipe.RenderedPrompt) -> tuple[Piece, ...]:
    prompt, found, at = rendered.prompt, [], 0
    for start, end in rendered.special_ranges:
        if start > at:
            found.append(Piece(prompt[at:start]))
        found.append(Piece(prompt[start:end], special=True))
        at = end
    if at < len(prompt):
        found.append(Piece(prompt[at:]))
    return tuple(found)


def answer_header(*, thinking: bool) -> tuple[Piece, Piece]:
    """What stands before every answer."""
    return (
        Piece(ASSISTANT, special=True),
        Piece(THINK_START if thinking else THINK_END, special=True),
    )


def encode_messages(
    messages: Sequence[dict[str, Any]], *, turn: Turn, empty: bool, ends_with_eos: bool
) -> tuple[tuple[Piece, ...], Turn]:
    """New messages for a session, without the header of the answer; and where it stands then.

    An answer that was cut short (``turn`` ANSWERING and no EOS) is closed first, as the encoding
    closes every assistant message.
    """
    chat = encode_chat({"messages": list(messages)}, thinking_default=False)
    pieces = list(chat.pieces)
    if not empty and pieces and pieces[0] == Piece(BOS, special=True):
        del pieces[0]
    if turn is Turn.ANSWERING and not ends_with_eos:
        pieces.insert(0, Piece(EOS, special=True))
    if tuple(pieces[-2:]) == answer_header(thinking=False):
        return tuple(pieces[:-2]), Turn.ASKED
    return tuple(pieces), Turn.ANSWERING  # a prefix message: its answer goes on
