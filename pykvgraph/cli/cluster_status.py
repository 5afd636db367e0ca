"""`pykvgraph cluster status`: what the workers of a running server do."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from typing import Any

import click

from pykvgraph.cli.show import new_table, print_json, print_table, safe_cell
from pykvgraph.errors import InvalidArgumentError, KVGraphError

_SECONDS = 10.0
_MOST_BYTES = 16 << 20


def show_status(url: str, api_key: str | None, as_json: bool) -> None:
    """A line for each worker. Raises KVGraphError for a server that can't be asked, or has no workers."""
    workers = _asked(url.rstrip("/"), api_key)
    if as_json:
        print_json({"workers": workers})
        return
    has_counts = any(_COUNTS[-1] in each for each in workers)
    table = new_table(
        "no.",
        "does",
        "asked",
        *(("read", "cached", "loaded", "said", "cells") if has_counts else ()),
        "restarts",
        "process",
    )
    for each in workers:
        table.add_row(
            str(each["worker"]),
            safe_cell(each["role"] if each["state"] == "ready" else each["state"]),
            f"{each['requests']}/{each['slots']}",
            *(_counts(each) if has_counts else ()),
            str(each["restarts"]),
            safe_cell(each["where"].removeprefix("process ")),
        )
    print_table(table)
    click.echo("\nasked: requests that it has now, of its slots")
    if has_counts:
        click.echo("read: tokens of prompts that it decoded. cached: that it had; of these, loaded")
        click.echo("from its tier, where copies of other workers come, too")
    else:
        click.echo("serve --metrics shows tokens and cells, too")


def _counts(worker: dict[str, Any]) -> list[str]:
    *tokens, used, total = (str(worker.get(name, "")) for name in _COUNTS)
    return [*tokens, f"{used}/{total}" if total else ""]


def _asked(url: str, api_key: str | None) -> list[dict[str, Any]]:
    # the variable is serve's, too, which takes several
    headers = {"Authorization": f"Bearer {api_key.split(',')[0]}"} if api_key else {}
    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError("it begins with neither http:// nor https://")
        request = urllib.request.Request(f"{url}/workers", headers=headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({}), _Stays).open(
            request, timeout=_SECONDS
        ) as reply:
            body = reply.read(_MOST_BYTES)
    except urllib.error.HTTPError as error:
        error.close()
        raise KVGraphError(f"{url}: {_REASONS.get(error.code, error)}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise KVGraphError(
            f"{url}: no server answers ({reason}); pykvgraph serve tells its address"
        ) from None
    except ValueError as error:
        raise InvalidArgumentError(f"{url}: {error}") from None
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not _are_workers(found):
        raise KVGraphError(f"{url}: what answers there is no pykvgraph serve --workers")
    return list(found)


class _Stays(urllib.request.HTTPRedirectHandler):
    """Follows nobody: the key is for this server alone. For the same reason no proxy is asked."""

    def redirect_request(self, *_: Any) -> None:
        """As urllib asks; None: the answer is an error."""


_REASONS = {
    401: "this server wants a key: --api-key",
    404: "this server has no workers; pykvgraph serve --workers N has",
}
_FIELDS = {"role": str, "state": str, "where": str} | dict.fromkeys(
    ("worker", "restarts", "slots", "requests"), int
)
_COUNTS = (
    "prompt_tokens",
    "prompt_tokens_cached",
    "tier_loaded_tokens",
    "tokens_predicted",
    "cells_used",
    "cells_total",
)


def _are_workers(found: Any) -> bool:
    return isinstance(found, list) and all(map(_is_worker, found))


def _is_worker(found: Any) -> bool:
    if not isinstance(found, dict):
        return False
    has_counts = _COUNTS[-1] in found
    fields = _FIELDS | (dict.fromkeys(_COUNTS, int) if has_counts else {})
    return all(isinstance(found.get(name), kind) for name, kind in fields.items())
