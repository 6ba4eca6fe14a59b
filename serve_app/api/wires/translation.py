"""Base class for jobs of other APIs, which are translated to chat requests.

Errors name the fields that the client sent.
"""

from serve_app.api.bodies.translation import TranslatedBody
from serve_app.api.endpoint import ApiContext
from serve_app.api.wires.chat import ChatJob
from serve_app.core.request import EngineRequest
from serve_app.errors import InvalidRequestError


class TranslatedJob(ChatJob):
    """A chat job for a body of another API."""

    def __init__(self, context: ApiContext, asked: TranslatedBody) -> None:
        """Raises as `ChatJob` does."""
        self._asked = asked
        with asked.named():
            super().__init__(context, asked.to_chat(context.service.tokenizer))

    async def prompt(self, cache_salt: str | None = None) -> list[int]:
        """Render and tokenize. Raises `InvalidRequestError`.

        These APIs have no explicit field to continue a message. If the template does not support
        it, the answer is a new message.
        """
        with self._asked.named():
            try:
                return await super().prompt(cache_salt)
            except InvalidRequestError as error:
                if error.param != "continue_final_message":
                    raise
            self.body = self.body.model_copy(update={"continue_final_message": None})
            return await super().prompt(cache_salt)

    async def engine_requests(self, cache_salt: str) -> list[EngineRequest]:
        """Render, tokenize and validate. Raises `InvalidRequestError`."""
        with self._asked.named():
            return await super().engine_requests(cache_salt)
