"""The FastAPI application: routes and middleware."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response

from serve_app.api.admission import AsyncAdmissionQueue
from serve_app.api.bodies.anthropic import CountTokensBody, MessagesBody
from serve_app.api.bodies.responses import ResponsesBody
from serve_app.api.bodies.schemas import ChatBody, CompletionBody, parse_body
from serve_app.api.bodies.token_ids import DetokenizeBody, TokenizeBody
from serve_app.api.door.access import Access
from serve_app.api.door.errors import http_exception_handler
from serve_app.api.door.guard import RequestGuard
from serve_app.api.door.limits import ApiLimits
from serve_app.api.drain import Drain
from serve_app.api.endpoint import ApiContext, GenerationResponse
from serve_app.api.openapi import DocumentedApi
from serve_app.api.peers import HeadAsGet, SlashAtEnd, add_peer_routes
from serve_app.api.prepare import check_model, check_tenant, decode_ids, encode_prompt, parsed
from serve_app.api.request_events import RequestLog, RequestObserver
from serve_app.api.service import Service
from serve_app.api.wires.anthropic import MessagesJob
from serve_app.api.wires.chat import ChatJob
from serve_app.api.wires.completions import CompletionJob
from serve_app.api.wires.embeddings import EmbeddingsBody, EmbeddingsJob
from serve_app.api.wires.responses import ResponsesJob
from serve_app.api.wires.translation import TranslatedJob
from serve_app.system.version import __version__
from serve_app.tenants.accounts import Accounts
from serve_app.tenants.tenant import Tenant

_QUESTION = [{"role": "user", "content": "Name the capital of France."}]


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
    """Build the HTTP API over `service`. It refuses requests once `drain` runs.

    `log` receives a summary of every generation request. `access` checks API keys and origins;
    without it, all requests are accepted.
    share_prefixes: tenants may reuse each other's cached prompts. `accounts` enforce limits and
    record usage.
    cors_origins: pages of these origins may read the answers.
    """
    app = DocumentedApi(title="serve_app", version=__version__, redirect_slashes=False)
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
    app.add_middleware(SlashAtEnd)  # outermost, so that `Access` checks the path served
    app.add_exception_handler(HTTPException, http_exception_handler)
    _add_generation(app, context)
    _add_models(app, context)
    _add_tokens(app, context)
    _add_operations(app, context)
    return app


def _add_generation(app: DocumentedApi, context: ApiContext) -> None:
    @app.post(
        "/v1/chat/completions",
        openapi_extra=app.accepts(ChatBody, {"messages": _QUESTION, "max_tokens": 64}, streams=True),
    )
    async def chat_completions(request: Request) -> Response:
        """OpenAI's chat completions: messages in, a message (or `n` of them) out, whole or as
        events."""
        return GenerationResponse(context, "chat", request, lambda raw: ChatJob(context, parse_body(ChatBody, raw)))

    @app.post(
        "/v1/completions",
        openapi_extra=app.accepts(
            CompletionBody, {"prompt": "The capital of France is", "max_tokens": 16}, streams=True
        ),
    )
    async def completions(request: Request) -> Response:
        """OpenAI's completions: texts or token ids in, the texts that follow them out, whole or as
        events."""
        return GenerationResponse(context, "completions", request, lambda raw: CompletionJob(context, raw))

    @app.post(
        "/v1/responses",
        openapi_extra=app.accepts(
            ResponsesBody, {"input": "Name the capital of France.", "max_output_tokens": 64}, streams=True
        ),
    )
    async def responses(request: Request) -> Response:
        """OpenAI's responses, whole or as events. Nothing is stored: `input` is the whole
        history."""
        return GenerationResponse(
            context, "responses", request, lambda raw: ResponsesJob(context, parse_body(ResponsesBody, raw))
        )

    @app.post(
        "/v1/messages", openapi_extra=app.accepts(MessagesBody, {"messages": _QUESTION, "max_tokens": 64}, streams=True)
    )
    async def messages(request: Request) -> Response:
        """Anthropic's messages, whole or as events. Errors have Anthropic's shape."""
        return GenerationResponse(
            context, "messages", request, lambda raw: MessagesJob(context, parse_body(MessagesBody, raw))
        )

    @app.post("/v1/embeddings", openapi_extra=app.accepts(EmbeddingsBody, {"input": ["a text", "another"]}))
    async def embeddings(request: Request) -> Response:
        """OpenAI's embeddings: texts or token ids in, a vector of length 1 for each out."""
        tenant: Tenant = request.state.tenant
        return GenerationResponse(
            context, "embeddings", request, lambda raw: EmbeddingsJob(context, parse_body(EmbeddingsBody, raw), tenant)
        )


def _add_models(app: DocumentedApi, context: ApiContext) -> None:
    def describe(name: str) -> dict[str, Any]:
        card = context.service.model
        return {
            "id": name,
            "object": "model",
            "created": card.created,
            "owned_by": "serve_app",
            "max_model_len": card.max_model_len,
        }

    @app.get("/v1/usage")
    async def usage(request: Request) -> dict[str, Any]:
        """Return the API key's usage today, and its limits."""
        return context.accounts.usage(request.state.tenant)

    @app.get("/v1/models")
    async def list_models(request: Request) -> dict[str, Any]:
        """Return a list of the served model, by each of its names."""
        card = context.service.model
        names = (card.name, *card.aliases) if request.state.tenant.may_use(card.name) else ()
        return {"object": "list", "data": [describe(name) for name in names]}

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str, request: Request) -> dict[str, Any]:
        """Return the served model, if it has this name."""
        check_model(name, context.service.model)
        check_tenant(request.state.tenant, context.service.model.name)
        return describe(name)


def _add_tokens(app: DocumentedApi, context: ApiContext) -> None:
    @app.post("/tokenize", openapi_extra=app.accepts(TokenizeBody, {"prompt": "The capital of France"}))
    async def tokenize_text(request: Request) -> dict[str, Any]:
        """Token ids of a text (`prompt`) or of a chat (`messages`); one of them must be given."""
        body = await parsed(partial(parse_body, TokenizeBody), await request.body())
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

    @app.post("/v1/messages/count_tokens", openapi_extra=app.accepts(CountTokensBody, {"messages": _QUESTION}))
    async def count_tokens(request: Request) -> dict[str, Any]:
        """Return the number of prompt tokens of these messages."""
        job = await parsed(lambda raw: TranslatedJob(context, parse_body(CountTokensBody, raw)), await request.body())
        check_tenant(request.state.tenant, context.service.model.name)
        context.accounts.open(request.state.tenant).begin(0)
        return {"input_tokens": len(await job.prompt())}

    @app.post("/detokenize", openapi_extra=app.accepts(DetokenizeBody, {"tokens": [504, 3575]}))
    async def detokenize(request: Request) -> dict[str, Any]:
        """Return the text of token ids."""
        body = await parsed(partial(parse_body, DetokenizeBody), await request.body())
        card, tokenizer = context.service.model, context.service.tokenizer
        check_model(body.model, card)
        check_tenant(request.state.tenant, card.name)
        context.accounts.open(request.state.tenant).begin(0)
        return {"prompt": await decode_ids(tokenizer, body.tokens, card)}


def _add_operations(app: DocumentedApi, context: ApiContext) -> None:
    @app.get("/health/live")
    async def live() -> dict[str, str]:
        """Return 200 if the process answers."""
        return {"status": "alive"}

    @app.get("/health/ready")
    async def ready() -> dict[str, str]:
        """Return 200 if requests can be served."""
        context.drain.check_open()
        context.service.check_ready()
        context.service.check_cluster()
        return {"status": "ready"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """All processes' metrics, in Prometheus' text format."""
        page = await context.service.metrics()
        return Response(page.body, media_type=page.content_type)

    add_peer_routes(app, context, ready)

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        """Return the server's version."""
        return {"version": app.version}
