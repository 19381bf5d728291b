"""The HTTP application: routes, and what stands before them.

    POST /v1/completions        POST /v1/chat/completions
    GET  /v1/models             GET  /v1/models/{id}
    GET  /health                GET  /metrics

Prompts and answers are never logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgec.serving.backend import Backend
from edgec.serving.chat import ChatCompletion
from edgec.serving.completions import Completion
from edgec.serving.errors import ApiError
from edgec.serving.generation import Generation
from edgec.serving.limits import Limits, check_host, check_key, read_body
from edgec.serving.metrics import Metrics
from edgec.serving.openai import ChatRequest, CompletionRequest, parse
from edgec.serving.stream import ClientGone, EventStream, to_json, unless_gone

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_GONE = 499  # nginx's number for a client that left; nobody reads it but the metrics

Asked = TypeVar("Asked", CompletionRequest, ChatRequest)


class Server:
    """One model behind the routes."""

    def __init__(self, backend: Backend, limits: Limits) -> None:
        self.backend = backend
        self.limits = limits
        self.metrics = Metrics(backend)
        self.draining = False
        self._open: set[Generation] = set()

    def drain(self) -> None:
        """Take no more requests; those that run go on."""
        self.draining = True

    def cancel_all(self) -> None:
        """End the answers that are being computed; their clients are told why."""
        for generation in list(self._open):
            generation.abort()

    async def completions(self, request: Request) -> ASGIApp | Response:
        asked = parse(CompletionRequest, await read_body(request, self.limits))
        self._check(asked, len(asked.prompts))
        self._check_tokens(asked.max_tokens, "max_tokens")
        return await self._answer(request, asked, Completion(asked, self.backend, self.backend.info.name))

    async def chat(self, request: Request) -> ASGIApp | Response:
        asked = parse(ChatRequest, await read_body(request, self.limits))
        self._check(asked, 1)
        if asked.limit is None and self.limits.max_tokens is not None:
            asked = asked.model_copy(update={"max_tokens": self.limits.max_tokens})
        self._check_tokens(asked.limit, "max_tokens")
        return await self._answer(request, asked, ChatCompletion(asked, self.backend, self.backend.info.name))

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return _json(self._model())

    async def health(self, request: Request) -> Response:
        failure = self.backend.failure or ("shutting down" if self.draining else None)
        return _json({"status": "ok" if failure is None else "failed", "reason": failure}, 503 if failure else 200)

    async def prometheus(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type=_METRICS_TYPE)

    async def _answer(
        self, request: Request, asked: CompletionRequest | ChatRequest, answer: Completion | ChatCompletion
    ) -> ASGIApp | Response:
        if self.draining or self.backend.failure is not None:
            raise ApiError(503, "the server takes no more requests", code="shutting_down", headers={"Retry-After": "5"})
        generation = Generation(self.backend, self.metrics)
        self._open.add(generation)

        def close() -> None:
            self._open.discard(generation)
            generation.close()

        streaming = False
        try:
            await generation.start(answer.requests)
            if asked.stream:
                streaming = True
                return EventStream(answer.chunks(generation), close, self.metrics.gone.inc)
            return _json(await unless_gone(request.receive, answer.whole(generation)))
        except ClientGone:
            self.metrics.gone.inc()
            return Response(status_code=_GONE)
        finally:
            if not streaming:
                close()

    def _model(self) -> dict[str, Any]:
        info = self.backend.info
        return {
            "id": info.name,
            "object": "model",
            "created": info.created,
            "owned_by": "edgec",
            "max_model_len": info.context,
        }

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.backend.info.name:
            message = f"there is no model {name[:100]!r} here; this server has {self.backend.info.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _check(self, asked: CompletionRequest | ChatRequest, prompts: int) -> None:
        self._check_model(asked.model)
        if prompts > self.limits.prompts:
            raise ApiError(400, f"`prompt`: at most {self.limits.prompts} at a time", param="prompt")
        if prompts * asked.n > self.limits.sequences:
            raise ApiError(400, f"`n`: at most {self.limits.sequences} answers to one call", param="n")
        wrong = next((t for t in map(int, asked.logit_bias) if t >= self.backend.info.vocab_size), None)
        if wrong is not None:
            raise ApiError(400, f"`logit_bias`: there is no token {wrong}", param="logit_bias", code="invalid_value")

    def _check_tokens(self, tokens: int | None, name: str) -> None:
        limit = self.limits.max_tokens
        if limit is not None and tokens is not None and tokens > limit:
            raise ApiError(400, f"`{name}`: this server answers with at most {limit} tokens", param=name)


def create_app(backend: Backend, limits: Limits | None = None) -> Starlette:
    """The application. It starts the backend when it starts, and stops it; `app.state.server` is the Server."""
    server = Server(backend, limits or Limits())

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        backend.start()
        try:
            yield
        finally:
            server.drain()
            await asyncio.to_thread(backend.stop)

    app = Starlette(
        routes=[
            Route("/v1/completions", server.completions, methods=["POST"]),
            Route("/v1/chat/completions", server.chat, methods=["POST"]),
            Route("/v1/models", server.models, methods=["GET"]),
            Route("/v1/models/{name:path}", server.model, methods=["GET"]),
            Route("/health", server.health, methods=["GET"]),
            Route("/metrics", server.prometheus, methods=["GET"]),
        ],
        exception_handlers={
            ApiError: _on_api_error,
            HTTPException: _on_http_error,
            Exception: _on_bug,
        },
        lifespan=lifespan,
    )
    app.state.server = server
    app.add_middleware(_Gate, server=server)
    return app


class _Gate:
    """Checks the host name and the key before anything is read, and counts answers."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app = app
        self._server = server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        counted = self._counting(scope, send)
        request = Request(scope)
        try:
            check_host(request, self._server.limits)
            if scope["path"].startswith("/v1/"):
                check_key(request, self._server.limits)
        except ApiError as error:
            await _error_response(error)(scope, receive, counted)
            return
        await self._app(scope, receive, counted)

    def _counting(self, scope: Scope, send: Send) -> Callable[[Message], Awaitable[None]]:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The route's pattern, not the path: a client can make up any number of paths.
                route = scope.get("route")
                path = getattr(route, "path", "other")
                self._server.metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        return counted


def _json(content: Any, status: int = 200) -> Response:
    return Response(to_json(content), status, media_type="application/json")


def _error_response(error: ApiError) -> Response:
    return JSONResponse(error.to_dict(), error.status, error.headers)


async def _on_api_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error_response(error)


async def _on_http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error_response(ApiError(error.status_code, error.detail, headers=error.headers))


async def _on_bug(_: Request, error: Exception) -> Response:
    return _error_response(ApiError(500, "a bug in the server; its log has more", code="internal_error"))
