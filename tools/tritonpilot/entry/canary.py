"""Live traffic for a model's candidate: a share of the requests goes to it instead (canary), or a copy of them does (shadow).

    canary = Canary("127.0.0.1:8000", "127.0.0.1:8001", say)      # Triton's HTTP and gRPC ports
    extras = Extras([canary]); canary.look = extras.look
    registry.register(canary)                                       # what came of it

The candidate of a model `ctr` is the model `ctr__next`; its own config says what it gets: `pilot_canary_of`, `pilot_canary_share`,
`pilot_shadow_share`. A canary that fails costs its caller some time and nothing else: the fronts ask the served model then.
Answers of a shadow are compared with the served ones and thrown away.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import grpc  # type: ignore[import-untyped]
import orjson
from tritonclient.grpc import service_pb2

from tritonpilot.entry import messages
from tritonpilot.entry.comparison import CanaryResult, Comparison, misfit, outputs_of
from tritonpilot.entry.extras import Answer, Asked, Content, Extra
from tritonpilot.entry.terms import ModelTerms
from tritonpilot.errors import ServerError

SUFFIX = "__next"
CANARY_OF, CANARY_SHARE, SHADOW_SHARE = "pilot_canary_of", "pilot_canary_share", "pilot_shadow_share"
LOOK_S = 0.5  # at the configs of candidates
ASK_TIMEOUT_S = 5.0
SHADOW_TIMEOUT_S = 30.0
MOST_SHADOWS = 16  # under way at once; more are dropped: they must cost the served model little
MOST_SHADOW_BYTES = 2**20  # of a request
_INFER = "/inference.GRPCInferenceService/ModelInfer"


@dataclass(frozen=True)
class Plan:
    """What a candidate gets of its model's requests. Shares are of 1."""

    candidate: str
    canary_share: float = 0.0
    shadow_share: float = 0.0


@dataclass(frozen=True)
class _Sent:
    """What was decided about a request, and when: a canary where `content` is None, else what its shadow will be asked."""

    plan: Plan
    at_s: float
    is_canary: bool
    content: Content | None


def plan_of(model: str, config: Mapping[str, Any]) -> Plan | None:
    """What the config of the candidate, in Triton's JSON form, says; None: nothing, or nonsense."""
    parameters = config.get("parameters") or {}

    def stated(name: str) -> str:
        return str((parameters.get(name) or {}).get("string_value", ""))

    if stated(CANARY_OF) != model:
        return None
    try:
        canary, shadow = float(stated(CANARY_SHARE) or 0), float(stated(SHADOW_SHARE) or 0)
    except ValueError:
        return None
    if not (0 <= canary <= 1 and 0 <= shadow <= 1 and canary + shadow > 0):
        return None
    return Plan(str(config.get("name", "")), canary, shadow)


class Canary(Extra):
    """An extra of the entry, and a collector of Prometheus."""

    def __init__(self, triton_http: str, triton_grpc: str, say: Callable[[str], None] = lambda _: None) -> None:
        self.look: Callable[[], None] = lambda: None
        """To be called when other models are wanted than before: Extras.look."""
        self._http = triton_http
        self._grpc = triton_grpc
        self._say = say
        self._models: set[str] = set()
        self._plans: dict[str, Plan] = {}
        self._seen: dict[str, Comparison] = {}
        self._shadows: set[asyncio.Task[None]] = set()
        self._random = random.Random()
        self._session: aiohttp.ClientSession | None = None
        self._channel: Any = None

    # -- Extra ---------------------------------------------------------------------------------------------------------

    def wants(self, terms: ModelTerms) -> bool:
        if not terms.name.endswith(SUFFIX):
            self._models.add(terms.name)
        return terms.name in self._plans

    def target(self, asked: Asked) -> str:
        plan = self._plans.get(asked.model)
        if plan is None or asked.version:
            return asked.model
        drawn = self._random.random()
        if drawn < plan.canary_share:
            if asked.content() is None:  # a sequence stays where it began
                return asked.model
            asked.notes[self] = _Sent(plan, time.monotonic(), True, None)
            return plan.candidate
        content = None
        if drawn < plan.canary_share + plan.shadow_share:
            content = self._shadowed(asked)
        asked.notes[self] = _Sent(plan, time.monotonic(), False, content)
        return asked.model

    def after(self, asked: Asked, answer: Answer | None, ok: bool) -> None:
        sent = asked.notes.get(self)
        if sent is None:
            return
        seconds = time.monotonic() - sent.at_s
        seen = self._comparison(asked.model)
        if sent.is_canary:
            fell_back = asked.target == asked.model
            result: CanaryResult = (
                "failed_both" if fell_back and not ok else "failed" if fell_back else "ok" if ok else "cancelled"
            )
            seen.canaries[result] += 1
            if result == "ok":
                seen.candidate_latency.observe(seconds)
            return
        if sent.plan.canary_share:
            seen.served["ok" if ok else "failed"] += 1
            if ok:
                seen.served_latency.observe(seconds)
        if sent.content is not None and ok and answer is not None:
            self._send_shadow(asked, sent.plan.candidate, sent.content, answer)

    async def keep_up(self) -> None:
        """Look for candidates, until cancelled."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
        timeout = aiohttp.ClientTimeout(total=SHADOW_TIMEOUT_S)
        async with (
            aiohttp.ClientSession(f"http://{self._http}", timeout=timeout) as self._session,
            grpc.aio.insecure_channel(self._grpc, options=options) as self._channel,
        ):
            try:
                while True:
                    await self._look()
                    await asyncio.sleep(LOOK_S)
            finally:
                for task in self._shadows:
                    task.cancel()

    # -- candidates ----------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        for model in tuple(self._models):
            try:
                plan = await self._ask(model)
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError):
                continue  # what was known holds: requests that fail there are asked again
            if plan == self._plans.get(model):
                continue
            if plan is None:
                old = self._plans.pop(model)
                self._say(f"model {model}: no more requests for {old.candidate}")
            else:
                self._plans[model] = plan
                self._seen[model] = Comparison()
                self._say(
                    f"model {model}: {plan.candidate} gets {plan.canary_share:.1%} of the requests, and a copy of "
                    f"{plan.shadow_share:.1%}"
                )
            self.look()

    async def _ask(self, model: str) -> Plan | None:
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
        async with self._session.get(f"/v2/models/{model}{SUFFIX}/config", timeout=timeout) as answer:
            if answer.status >= 500 and answer.status != 503:
                raise OSError(f"Triton answered {answer.status}")
            content = await answer.read()
            return plan_of(model, orjson.loads(content)) if answer.status == 200 else None

    # -- shadows -------------------------------------------------------------------------------------------------------

    def _shadowed(self, asked: Asked) -> Content | None:
        """What the shadow will be asked. None: nothing."""
        content = asked.content()
        if content is None:
            return None
        if len(self._shadows) >= MOST_SHADOWS or len(content.text) + len(content.tail) > MOST_SHADOW_BYTES:
            self._comparison(asked.model).shadows["dropped"] += 1
            return None
        # NOTE: a copy, for the tail is a view of the whole request.
        return Content(content.text, bytes(content.tail))

    def _send_shadow(self, asked: Asked, candidate: str, content: Content, answer: Answer) -> None:
        task = asyncio.get_running_loop().create_task(self._shadow(asked, candidate, content, answer))
        self._shadows.add(task)
        task.add_done_callback(self._shadows.discard)

    async def _shadow(self, asked: Asked, candidate: str, content: Content, answer: Answer) -> None:
        level = asked.terms.classes[-1].level  # a shadow goes before nobody
        send = self._shadow_over_http if asked.protocol == "http" else self._shadow_over_grpc
        seen = self._comparison(asked.model)
        try:
            copy = await send(candidate, content, level)
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError, grpc.aio.AioRpcError, ServerError) as error:
            seen.shadows["failed"] += 1
            if seen.said != (said := f"{error!r:.300}"):
                seen.said = said
                self._say(f"{candidate} did not answer a copy of a request to {asked.model}: {said}")
            return
        # Arrays are compared in a thread: the loop has requests to serve.
        await asyncio.to_thread(_compare, seen, answer, copy, asked.protocol)

    async def _shadow_over_http(self, candidate: str, content: Content, level: int) -> Answer:
        assert self._session is not None
        text = content.text
        if level:
            asked = orjson.loads(text)
            asked.setdefault("parameters", {})[messages.PRIORITY_PARAMETER] = level
            text = orjson.dumps(asked)
        headers = {"Inference-Header-Content-Length": str(len(text))} if content.tail else {}
        async with self._session.post(
            f"/v2/models/{candidate}/infer", data=text + content.tail, headers=headers
        ) as answer:
            body = await answer.read()
            if answer.status != 200:
                raise ServerError(body[:300].decode(errors="replace"))
            size = int(answer.headers.get("Inference-Header-Content-Length", len(body)))
            return Answer(body[:size], body[size:])

    async def _shadow_over_grpc(self, candidate: str, content: Content, level: int) -> Answer:
        request = service_pb2.ModelInferRequest.FromString(content.text)
        request.model_name = candidate
        if level:
            request.parameters[messages.PRIORITY_PARAMETER].uint64_param = level
        infer = self._channel.unary_unary(_INFER)
        return Answer(await infer(request.SerializeToString(), timeout=SHADOW_TIMEOUT_S))

    # -- metrics -------------------------------------------------------------------------------------------------------

    def _comparison(self, model: str) -> Comparison:
        return self._seen.setdefault(model, Comparison())

    def collect(self) -> Iterator[Any]:
        """For Prometheus. Counts begin anew when a candidate's shares change."""
        yield from Comparison.collect(
            {model: (plan.canary_share, plan.shadow_share) for model, plan in tuple(self._plans.items())},
            dict(self._seen),
        )


def _compare(seen: Comparison, answer: Answer, copy: Answer, protocol: str) -> None:
    try:
        served, candidate = outputs_of(answer, protocol), outputs_of(copy, protocol)
    except Exception:  # noqa: BLE001  what Triton's client meets in an answer that is none is of any type
        seen.shadows["misfit"] += 1
        return
    kind = misfit(served, candidate)
    seen.shadows[kind or "ok"] += 1
    if not kind:
        seen.take(served, candidate)
