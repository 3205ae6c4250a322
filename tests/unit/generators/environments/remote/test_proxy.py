"""Refusals of the endpoint of agents on an environment server, in the words of their wire."""

import aiohttp
import pytest

from slipstream.generators.environments.remote.messages import AgentAnswer
from slipstream.generators.environments.remote.proxy import PolicyProxy


@pytest.mark.parametrize(
    ("path", "has_key", "status", "kind"),
    [
        ("messages", False, 401, "authentication_error"),
        ("messages", True, 503, "api_error"),
        ("responses", False, 401, "invalid_request_error"),
        ("responses", True, 503, "server_error"),
        ("messages/" + "x" * 200, True, 404, "not_found_error"),
    ],
)
async def test_refusals_have_the_form_of_their_wire(
    path: str, status: int, kind: str, *, has_key: bool
):
    proxy = PolicyProxy()

    async def ask(call: int, _path: str, _body: bytes) -> None:
        gone = AgentAnswer(client="-", number=0, call=call, body=b"", is_last=True)
        proxy.answered(key, gone)

    async def leave(_call: int) -> None:
        raise AssertionError("nobody leaves")

    await proxy.start()
    key = proxy.open(ask, leave)
    headers = {"Authorization": f"Bearer {key if has_key else 'no'}"}
    try:
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{proxy.url}/{path}", json={}) as answer,
        ):
            assert answer.status == status
            body = await answer.json()
    finally:
        await proxy.close()
    assert body["error"]["type"] == kind
    assert (body.get("type") == "error") is path.startswith("messages")
