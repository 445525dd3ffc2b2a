"""Reads the body of a request, up to the limit, and parses it as one JSON object.  Knows no field."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from starlette.types import Receive

from specdec.checks import distinct
from specdec.serve.wire.errors import ApiError, ClientGone, too_slow, wrong

MIN_RATE = 1 << 14  # bytes: each so many of a body give it a second more


async def read_body(receive: Receive, headers: Mapping[str, str], limit: int, seconds: float) -> bytes:
    """The whole body.

    seconds: in which it must come; a body that comes at MIN_RATE or faster has always time enough.
    ApiError 413 if it is longer than the limit, before more than that has been read; 415 if it is not announced as JSON, or is
    compressed; 408 if it does not come in time.
    """
    _check_type(headers.get("content-type", ""))
    _check_encoding(headers.get("content-encoding", "identity"))
    announced = headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > limit:
        raise _too_long(limit)
    body, is_open, began = bytearray(), True, asyncio.get_running_loop().time()
    while is_open:
        allowed = seconds + len(body) / MIN_RATE
        try:
            async with asyncio.timeout_at(began + allowed):
                message = await receive()
        except TimeoutError:
            raise too_slow(allowed, len(body)) from None
        if message["type"] != "http.request":
            raise ClientGone
        body += message.get("body", b"")
        is_open = message.get("more_body", False)
        if len(body) > limit:
            raise _too_long(limit, leaves_body=is_open)
    return bytes(body)


def _check_type(announced: str) -> None:
    """ApiError 415 for anything but JSON.

    Browsers let every web page send other types to any address, this machine's own included, without asking the server first.
    """
    if announced.partition(";")[0].strip().lower() != "application/json":
        message = f"the body must be JSON and say so, got the type {announced[:100]!r}"
        nearest = "nearest thing that works: the header Content-Type: application/json"
        raise ApiError(415, f"{message}; {nearest}", code="unsupported_media_type", leaves_body=True)


def _check_encoding(announced: str) -> None:
    """ApiError 415 for a body that would first have to be unpacked, to nobody knows what length."""
    if announced.strip().lower() not in ("", "identity"):
        message = f"the body must come as it is, got the encoding {announced[:100]!r}"
        nearest = "nearest thing that works: no header Content-Encoding, and the JSON itself"
        raise ApiError(415, f"{message}; {nearest}", code="unsupported_media_type", leaves_body=True)


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object.  ApiError 400 for everything else."""
    if not body.strip():
        raise wrong(None, "the body is empty: expected a JSON object")
    try:
        text = body.decode()
        found = json.loads(text, object_pairs_hook=distinct, parse_constant=_refuse_constant)
        if "\\ud" in text.lower():  # a pair of such escapes is a character, half of one is not
            json.dumps(found, ensure_ascii=False).encode()
    except RecursionError:
        raise wrong(None, "the body is not usable JSON: it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise wrong(None, f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except UnicodeEncodeError:
        raise wrong(None, "the body holds half of a surrogate pair, which is no character") from None
    except ValueError as error:  # JSONDecodeError, numbers of thousands of digits, and the refusals below
        is_digits = "sys.set_int_max_str_digits" in str(error)  # Python's advice is for the server's code
        fault = "it holds a number of thousands of digits" if is_digits else error
        raise wrong(None, f"the body is not usable JSON: {fault}") from None
    if not isinstance(found, dict):
        raise wrong(None, f"the body must be a JSON object, got {type(found).__name__}")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _too_long(limit: int, leaves_body: bool = True) -> ApiError:
    message = f"the body is longer than {limit} bytes, the most that this server takes (--max-body-bytes)"
    return ApiError(413, message, code="body_too_large", leaves_body=leaves_body)
