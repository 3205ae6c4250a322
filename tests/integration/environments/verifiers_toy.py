"""A toy taskset of verifiers, and an agent that plays it in the same process, without a network."""

from collections.abc import Iterator

import httpx
import verifiers.v1 as vf


class Numbered(vf.TaskData):
    answer: str = ""


class Sum(vf.Task[Numbered, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, task: Numbered, trace: vf.Trace) -> float:
        if task.answer == "raise":
            raise RuntimeError("it cannot be scored")
        return float(said(trace)[-1] == task.answer)

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(len(said(trace)))


def said(trace: vf.Trace) -> list[str]:
    return [str(node.message.content) for node in trace.nodes if node.message.role == "assistant"]


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self) -> Iterator[Sum]:
        for first, answer in ((1, "3"), (2, "4"), (3, "raise")):
            prompt = f"{first} + 2 = ?"
            yield Sum(
                Numbered(prompt=prompt, system_prompt="Add.", answer=answer), self.config.task
            )


class Twice(vf.Harness[vf.HarnessConfig]):
    """Asks the question, then whether that is sure."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,  # noqa: ARG002 of the interface, as those below
        runtime: vf.Runtime,  # noqa: ARG002
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],  # noqa: ARG002
        data: vf.TaskData,
        tool_interception_url: str | None = None,  # noqa: ARG002
    ) -> vf.ProgramResult:
        system, prompt = self.resolve_text_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        async with httpx.AsyncClient(base_url=endpoint, timeout=60) as client:
            for asked in (None, "Are you sure?"):
                if asked is not None:
                    messages.append({"role": "user", "content": asked})
                answer = await client.post(
                    "chat/completions",
                    json={"model": ctx.model, "messages": messages},
                    headers={"Authorization": f"Bearer {secret}"},
                )
                answer.raise_for_status()
                messages.append(answer.json()["choices"][0]["message"])
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["Sums", "Twice"]
