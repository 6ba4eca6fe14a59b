"""The chat request that a body of another API means, as a job: its errors name the fields that the client sent."""

from serve_app.api.bodies.translation import TranslatedBody
from serve_app.api.endpoint import ApiContext
from serve_app.api.wires.chat import ChatJob
from serve_app.core.request import EngineRequest
from serve_app.errors import InvalidRequestError


class TranslatedJob(ChatJob):
    """The chat request that a body of another API means."""

    def __init__(self, context: ApiContext, asked: TranslatedBody) -> None:
        """Raises what `ChatJob` raises."""
        self._asked = asked
        with asked.named():
            super().__init__(context, asked.to_chat(context.service.tokenizer))

    async def prompt(self, cache_salt: str | None = None) -> list[int]:
        """Render and tokenize. Raises `InvalidRequestError`.

        No such body asks in so many words to continue a message: where the template hides it, a new one follows.
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
        """Render, tokenize, validate."""
        with self._asked.named():
            return await super().engine_requests(cache_salt)
