"""Connection to the service, and what its errors mean for a run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

import httpx
import tinker
from tinker.lib.base_url import resolve_base_url
from tinker.lib.retryable_exception import RetryableException
from tinker.types import RequestErrorCategory, SupportedModel

from megatron_fleet.config.errors import UserError
from megatron_fleet.hosted.address import KEY


class ServiceLost(Exception):
    """The service failed through no fault of the run; the request may or may not have been executed."""


@contextlib.contextmanager
def service_errors(what: str) -> Iterator[None]:
    """Translate errors of the `tinker` package. It has already retried temporary failures: lost connections and the
    statuses 408, 409, 429 and 5xx for five minutes, unpaid bills for an hour.

    Args:
        what: the request in words, with which messages begin.

    Raises:
        UserError: the service refuses the request, and would again.
        ServiceLost: anything else.
    """
    try:
        yield
    except tinker.AuthenticationError as error:
        raise UserError(f"{what}: the service refuses the key ({error.message}); set {KEY} to a valid one.") from error
    except tinker.PermissionDeniedError as error:
        raise UserError(f"{what}: the key may not do this ({error.message}); use another {KEY}.") from error
    except tinker.BillingError as error:
        raise UserError(
            f"{what}: the account cannot pay ({error.message}); resolve this in the service's console, then run the "
            f"same command again to resume from the newest checkpoint."
        ) from error
    except (tinker.BadRequestError, tinker.UnprocessableEntityError) as error:
        raise UserError(f"{what}: the service refuses the request: {error.message}.") from error
    except tinker.RequestFailedError as error:
        if error.category is RequestErrorCategory.User:
            raise UserError(f"{what}: the service refuses the request: {error}.") from error
        raise ServiceLost(f"{what}: {error}") from error
    except tinker.TinkerError as error:
        if type(error) is tinker.TinkerError:  # of the package itself, about the key
            raise UserError(
                f"{KEY}: no usable key was found ({error}); set it to a key of the service, which begins with tml-."
            ) from None
        raise ServiceLost(f"{what}: {type(error).__name__}: {error}") from error
    except (
        *(RetryableException, OSError),
        *(ValueError, KeyError, AssertionError, RuntimeError),
    ) as error:
        # The package raises ValueError for answers that it cannot read and for requests that the service forgot, and
        # others of these where an answer lacks something.
        raise ServiceLost(f"{what}: {type(error).__name__}: {error}") from error


def check_service(model: ServedModel, url: str | None, answer_s: float) -> SupportedModel:
    """Refuse a model or a length that the service does not train, and a key that it does not take. Returns the model.

    Args:
        url: see `address`.
        answer_s: seconds in which it must answer; the package itself would try for five minutes.

    Raises:
        UserError: it refuses, or does not answer.
    """
    models: list[SupportedModel] = []
    failed: list[Exception] = []

    def ask() -> None:
        try:
            with service_errors("Asking the service for its models"):
                models.extend(tinker.RestClient(base_url=url).get_server_capabilities().result().supported_models)
        except Exception as error:
            failed.append(error)

    asking = threading.Thread(target=ask, daemon=True)  # one that gets no answer must not keep the process from ending
    asking.start()
    asking.join(answer_s)
    if failed and isinstance(failed[0], UserError):
        raise failed[0]
    if failed or asking.is_alive():
        why = failed[0] if failed else f"no answer in {answer_s:g} s"
        named = "the service of Thinking Machines" if url is None else f"the service at {url}"
        raise UserError(f"hosted.url: {named} cannot be reached ({why}); check the address and the network.") from None
    return model.check(models)


def clock_difference_s(url: str | None, answer_s: float) -> float:
    """Seconds by which the service's clock is ahead of this machine's, to about a second; 0 if it tells no time.

    Args:
        url: see `address`.
    """
    with contextlib.suppress(httpx.HTTPError, httpx.InvalidURL, KeyError, ValueError):
        answer = httpx.get(resolve_base_url(url), timeout=answer_s)
        return parsedate_to_datetime(answer.headers["date"]).timestamp() - time.time()
    return 0.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that a run asks the service for.

    Attributes:
        name: of the model at the service.
        max_context: most tokens of a sequence.
    """

    name: str | None
    max_context: int

    def check(self, models: Sequence[SupportedModel]) -> SupportedModel:
        """Return it as it is among ``models`` of the service.

        Raises:
            UserError: the service does not train it, or not on sequences of this length.
        """
        trained = {model.model_name: model for model in models if model.trainable is not False}
        if self.name not in trained:
            known = ", ".join(sorted(filter(None, trained))) or "none"
            raise UserError(f"hosted.base_model={self.name}: the service does not train this model; it trains {known}.")
        found = trained[self.name]
        longest = found.max_context_length
        if longest is not None and longest < self.max_context:
            raise UserError(
                f"rollout.max_context={self.max_context}: the service trains {self.name} on at most {longest} tokens; "
                f"lower it to that."
            )
        return found
