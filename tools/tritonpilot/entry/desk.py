"""Who is calling, which model is meant, and what class does the request have? What both fronts ask before the gate.

tenant = desk.identify(key)                                  # None without a tenants file; raises Denied
terms = desk.terms(model) or await desk.fetch_terms(model)   # raises Denied for a model that Triton does not have
class_name = desk.class_of(tenant, terms, named, priority)   # raises Denied

Terms come from Triton's own model config and are read again every few seconds, so that a model which was loaded with other
classes, or unloaded, is noticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import aiohttp
from tritonclient.http.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException

from tritonpilot.entry import messages
from tritonpilot.entry.extras import Extras
from tritonpilot.entry.gate import Gate
from tritonpilot.entry.messages import Denied
from tritonpilot.entry.tenants import KeyFile, KeyRefused, Tenant
from tritonpilot.entry.terms import ModelTerms, terms_of
from tritonpilot.errors import PilotError

LOOK_S = 1.0  # at the tenants file
REFRESH_S = 5.0
UNKNOWN_FOR_S = 1.0  # a model that Triton did not know is not asked for again before
ASK_TIMEOUT_S = 5.0
UNKNOWN_MOST = 1000  # names of unknown models that are remembered


class Desk:
    """What the fronts share. `triton` is host:port of Triton's HTTP service."""

    def __init__(
        self,
        gate: Gate,
        triton: str,
        tenants: KeyFile | None = None,
        *,
        say: Callable[[str], None] = lambda _: None,
        on_denied: Callable[[int], None] = lambda _: None,
        extras: Extras | None = None,
    ) -> None:
        self.gate = gate
        self.extras = extras or Extras()
        self.tenants = tenants
        self.on_denied = on_denied
        """Called with the HTTP status whenever a front answers before the gate saw the request."""
        self._say = say
        self._triton = triton
        self._client: Any = None
        self._terms: dict[str, ModelTerms] = {}
        self._asking: dict[str, asyncio.Task[ModelTerms]] = {}
        self._unknown: dict[str, float] = {}
        """Until when a model that Triton did not know is not asked for again."""

    def identify(self, key: str | None) -> Tenant | None:
        """The tenant with this key; None without a tenants file. Raises Denied 401."""
        if self.tenants is None:
            return None
        try:
            return self.tenants.current.identify(key)
        except KeyRefused as error:
            raise messages.refused("key", str(error)) from None

    def terms(self, model: str) -> ModelTerms | None:
        """The terms of a model that has been asked for before."""
        return self._terms.get(model)

    async def fetch_terms(self, model: str) -> ModelTerms:
        """The terms of a model, from Triton. Raises Denied: 404 when it has no such model, 502 when it does not answer."""
        known = self._terms.get(model)
        if known is not None:
            return known
        if asyncio.get_running_loop().time() < self._unknown.get(model, 0.0):
            raise _unknown(model)
        task = self._asking.get(model)
        if task is None:
            task = self._asking[model] = asyncio.ensure_future(self._ask(model))
            task.add_done_callback(lambda done: self._told(model, done))
        return await asyncio.shield(task)

    def class_of(self, tenant: Tenant | None, terms: ModelTerms, named: str | None, priority: int | None) -> str:
        """The class that a request has: its tenant's, else the one that it names, else the default.

        `priority` is a priority level of Triton's, None for none. Raises Denied.
        """
        if tenant is not None:
            return self._class_of_tenant(tenant, terms)
        if named is not None:
            if any(each.name == named for each in terms.classes if each.name):
                return named
            raise messages.refused(
                "unknown_class", f"Model '{terms.name}' has no class '{named[:64]}'; {_classes_of(terms)}."
            )
        if priority is None:
            return terms.default_class
        for each in terms.classes:
            if each.level == priority:
                return each.name
        if terms.classes[0].level == 0:  # without classes Triton, too, does not look at priorities
            return terms.default_class
        raise messages.refused(
            "unknown_class", f"Model '{terms.name}' has no class of priority {priority}; {_classes_of(terms)}."
        )

    async def keep_up(self) -> None:
        """Read the tenants file when it changed, and the terms of known models again, and let the extras work, until cancelled.

        Apart, for a Triton that hangs must not keep a revoked key alive.
        """
        await asyncio.gather(self._watch_tenants(), self._watch_models(), self.extras.keep_up())

    async def _watch_tenants(self) -> None:
        while self.tenants is not None:
            await asyncio.sleep(LOOK_S)
            self.tenants.poll(is_settled=True)

    async def _watch_models(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            for model in list(self._terms):
                try:
                    await self._ask(model)
                except Denied:
                    continue
                except Exception as error:  # noqa: BLE001  whatever Triton says: terms that are known stay in force
                    self._say(f"the terms of model {model} cannot be read: {error!r}")

    async def close(self) -> None:
        """End the connection to Triton."""
        if self._client is not None:
            await self._client.close()

    def _class_of_tenant(self, tenant: Tenant, terms: ModelTerms) -> str:
        if not tenant.may_use(terms.name):
            raise messages.refused("forbidden", f"Tenant '{tenant.name}' may not use model '{terms.name}'.")
        if terms.caches:
            raise messages.refused(
                "forbidden",
                f"Model '{terms.name}' uses Triton's response cache, which would answer one tenant with what another asked. "
                "Set cache.kind to lfu in its service file, or serve it without tenants.",
            )
        wanted = tenant.class_for(terms.name)
        if wanted is None:
            return terms.default_class
        if not any(each.name == wanted for each in terms.classes):
            raise messages.refused(
                "forbidden",
                f"Tenant '{tenant.name}' has the class '{wanted}', which model '{terms.name}' does not have; {_classes_of(terms)}. "
                "Correct the tenants file.",
            )
        return wanted

    async def _ask(self, model: str) -> ModelTerms:
        if self._client is None:
            self._client = InferenceServerClient(self._triton, conn_timeout=ASK_TIMEOUT_S)
        try:
            config = await self._client.get_model_config(model)
            terms = terms_of(config)
        except InferenceServerException as error:
            said = str(error).lower()
            if "unknown model" in said or "not found" in said or "is not ready" in said:
                self._forget(model)
                raise _unknown(model) from None
            raise messages.refused("broken", f"Triton did not tell the config of model '{model}': {error}") from None
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            raise messages.refused("starting", f"Triton cannot be reached: {error}", 1.0) from None
        except PilotError as error:
            self._forget(model)
            raise messages.refused("broken", str(error)) from None
        if self._terms.get(model) != terms:
            names = ", ".join(each.name for each in terms.classes if each.name) or "none"
            self._say(f"model {model}: classes {names}, {terms.window_rows} rows in flight")
            self._terms[model] = terms
            self.extras.told(terms)
        return terms

    def _forget(self, model: str) -> None:
        self._terms.pop(model, None)
        self.extras.gone(model)

    def _told(self, model: str, task: asyncio.Task[ModelTerms]) -> None:
        self._asking.pop(model, None)
        error = None if task.cancelled() else task.exception()
        self._unknown.pop(model, None)
        if isinstance(error, Denied) and error.http_status == 404:
            if len(self._unknown) >= UNKNOWN_MOST:
                self._unknown.clear()
            self._unknown[model] = asyncio.get_running_loop().time() + UNKNOWN_FOR_S


def _unknown(model: str) -> Denied:
    """A new one each time: a raised error holds the frames, and so the request, of its caller."""
    return messages.refused("unknown_model", f"Triton has no model '{model[:128]}' that is ready.")


def _classes_of(terms: ModelTerms) -> str:
    names = [f"{each.name} (priority {each.level})" for each in terms.classes if each.name]
    return f"it has {', '.join(names)}" if names else "it has no classes"
