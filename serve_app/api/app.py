"""The FastAPI application: its routes, and what runs around them."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI, Request
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from serve_app.api.access import Access
from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.api.anthropic import MessagesJob
from serve_app.api.anthropic_body import CountTokensBody, MessagesBody
from serve_app.api.body import Body
from serve_app.api.chat import ChatJob
from serve_app.api.completions import CompletionJob
from serve_app.api.drain import Drain
from serve_app.api.endpoint import ApiContext, GenerationResponse
from serve_app.api.errors import http_exception_handler
from serve_app.api.guard import RequestGuard
from serve_app.api.limits import ApiLimits
from serve_app.api.peers import HeadAsGet, add_peer_routes
from serve_app.api.prepare import check_model, check_tenant, decode_ids, encode_prompt
from serve_app.api.request_events import RequestLog, RequestObserver
from serve_app.api.responses import ResponsesJob
from serve_app.api.responses_body import ResponsesBody
from serve_app.api.schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, parse_body
from serve_app.api.service import Service
from serve_app.api.translation import TranslatedJob
from serve_app.tenants.accounts import Accounts


def create_app(
    service: Service,
    admission: AsyncAdmissionQueue,
    limits: ApiLimits,
    observer: RequestObserver,
    drain: Drain | None = None,
    log: RequestLog = lambda _: None,
    access: Access | None = None,
    share_prefixes: bool = False,
    accounts: Accounts | None = None,
    cors_origins: Sequence[str] = (),
) -> FastAPI:
    """The whole HTTP API over `service`, until `drain` runs; `log` is told of every generation request.

    `access` says who may come in: without it, anybody. `share_prefixes`: tenants may find each other's prompts.
    `accounts` hold what tenants may use and have used. `cors_origins`: browsers may show answers to these pages.

    No documentation pages: FastAPI's load their scripts from a CDN.
    """
    app = _Api(title="serve_app", version=version("serve_app"), docs_url=None, redoc_url=None)
    drain, accounts = drain or Drain(), accounts or Accounts()
    context = ApiContext(service, admission, limits, observer, drain, log, accounts, share_prefixes)
    app.add_middleware(HeadAsGet)
    app.add_middleware(RequestGuard, limits=limits, observer=observer, access=access or Access())
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_exception_handler(HTTPException, http_exception_handler)
    _add_generation(app, context)
    _add_models(app, context)
    _add_tokens(app, context)
    _add_operations(app, context)
    return app


_BODIES = (ChatBody, CompletionBody, ResponsesBody, MessagesBody, CountTokensBody, TokenizeBody, DetokenizeBody)


class _Api(FastAPI):
    """Bodies are parsed by us, so FastAPI has to be told their schemas for /openapi.json."""

    def openapi(self) -> dict[str, Any]:
        schema = super().openapi()
        _, definitions = models_json_schema([(body, "validation") for body in _BODIES], ref_template=_REF)
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        return schema


_REF = "#/components/schemas/{model}"


def _accepts(body: type[Body]) -> dict[str, Any]:
    schema = {"$ref": _REF.format(model=body.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _add_generation(app: FastAPI, context: ApiContext) -> None:
    @app.post("/v1/chat/completions", openapi_extra=_accepts(ChatBody))
    async def chat_completions(request: Request) -> Response:
        return GenerationResponse(context, "chat", request, lambda raw: ChatJob(context, parse_body(ChatBody, raw)))

    @app.post("/v1/completions", openapi_extra=_accepts(CompletionBody))
    async def completions(request: Request) -> Response:
        return GenerationResponse(context, "completions", request, lambda raw: CompletionJob(context, raw))

    @app.post("/v1/responses", openapi_extra=_accepts(ResponsesBody))
    async def responses(request: Request) -> Response:
        return GenerationResponse(
            context, "responses", request, lambda raw: ResponsesJob(context, parse_body(ResponsesBody, raw))
        )

    @app.post("/v1/messages", openapi_extra=_accepts(MessagesBody))
    async def messages(request: Request) -> Response:
        return GenerationResponse(
            context, "messages", request, lambda raw: MessagesJob(context, parse_body(MessagesBody, raw))
        )


def _add_models(app: FastAPI, context: ApiContext) -> None:
    def describe() -> dict[str, Any]:
        card = context.service.model
        return {
            "id": card.name,
            "object": "model",
            "created": card.created,
            "owned_by": "serve_app",
            "max_model_len": card.max_model_len,
        }

    @app.get("/v1/usage")
    async def usage(request: Request) -> dict[str, Any]:
        return context.accounts.usage(request.state.tenant)

    @app.get("/v1/models")
    async def list_models(request: Request) -> dict[str, Any]:
        visible = request.state.tenant.may_use(context.service.model.name)
        return {"object": "list", "data": [describe()] if visible else []}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str, request: Request) -> dict[str, Any]:
        check_model(name, context.service.model)
        check_tenant(request.state.tenant, name)
        return describe()


def _add_tokens(app: FastAPI, context: ApiContext) -> None:
    @app.post("/tokenize", openapi_extra=_accepts(TokenizeBody))
    async def tokenize_text(request: Request) -> dict[str, Any]:
        body = parse_body(TokenizeBody, await request.body())
        card, tokenizer = context.service.model, context.service.tokenizer
        check_model(body.model, card)
        check_tenant(request.state.tenant, card.name)
        context.accounts.open(request.state.tenant).begin(0)
        if (chat := body.to_chat()) is not None:
            ids = await ChatJob(context, chat).prompt()
        else:
            special = body.add_special_tokens is not False
            ids = await encode_prompt(tokenizer, body.prompt or "", card, add_special_tokens=special)
        return {"tokens": ids, "count": len(ids), "max_model_len": card.max_model_len}

    @app.post("/v1/messages/count_tokens", openapi_extra=_accepts(CountTokensBody))
    async def count_tokens(request: Request) -> dict[str, Any]:
        body = parse_body(CountTokensBody, await request.body())
        check_tenant(request.state.tenant, context.service.model.name)
        context.accounts.open(request.state.tenant).begin(0)
        return {"input_tokens": len(await TranslatedJob(context, body).prompt())}

    @app.post("/detokenize", openapi_extra=_accepts(DetokenizeBody))
    async def detokenize(request: Request) -> dict[str, Any]:
        body = parse_body(DetokenizeBody, await request.body())
        card, tokenizer = context.service.model, context.service.tokenizer
        check_model(body.model, card)
        check_tenant(request.state.tenant, card.name)
        context.accounts.open(request.state.tenant).begin(0)
        return {"prompt": await decode_ids(tokenizer, body.tokens, card)}


def _add_operations(app: FastAPI, context: ApiContext) -> None:
    @app.get("/health/live")
    async def live() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/health/ready")
    async def ready() -> dict[str, str]:
        context.drain.check_open()
        context.service.check_ready()
        return {"status": "ready"}

    @app.get("/metrics")
    async def metrics() -> Response:
        page = await context.service.metrics()
        return Response(page.body, media_type=page.content_type)

    add_peer_routes(app, context, ready)

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": app.version}
