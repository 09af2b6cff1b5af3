"""What the Hub or the network refused, said so that the user knows the way out."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from huggingface_hub import get_token
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from tileinfer_core.aliases import nearest
from tileinfer_core.download import TransportError
from tileinfer_core.errors import AccessError, ModelNotFoundError, TileinferError

if TYPE_CHECKING:
    from tileinfer_core.store import Store


def endpoint() -> str:
    """The Hub's address: $HF_ENDPOINT, or the public one. Read at every call, unlike the client's own constant."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


class HubErrors:
    """A block that talks to the Hub about `model`; the client's errors leave it as ours. `store` knows near names."""

    def __init__(self, store: Store | None, model: str) -> None:
        self.store = store
        self.model = model

    def __enter__(self) -> None:
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
            raise self._offline()

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None or isinstance(error, TileinferError) or not isinstance(error, Exception):
            return
        if isinstance(error, OfflineModeIsEnabled):
            raise self._offline() from error
        if isinstance(error, HfHubHTTPError):
            raise self._refused(error) from error
        if isinstance(error, TransportError):
            raise TileinferError(
                f"can't reach {endpoint()}: {str(error) or type(error).__name__}",
                hint="check the network; models on this disk run without it",
            ) from error
        if isinstance(
            error, (ValueError, KeyError, TypeError)
        ):  # an answer that is no Hub's: a proxy's login page, say
            raise TileinferError(f"{endpoint()} does not answer like a Hugging Face Hub: {error!r:.120}") from error

    def _offline(self) -> TileinferError:
        return TileinferError(f"{self.model} can't be fetched: HF_HUB_OFFLINE is set", hint="unset HF_HUB_OFFLINE")

    def _refused(self, error: HfHubHTTPError) -> TileinferError:
        status = error.response.status_code
        page = f"{endpoint()}/{self.model}"
        has_token = get_token() is not None
        if isinstance(error, GatedRepoError) or (status == 403 and not isinstance(error, DisabledRepoError)):
            if not has_token:
                return AccessError(
                    f"{self.model} is open only to accounts that accepted its terms, and no token is set",
                    hint=f"accept them at {page}, then set HF_TOKEN (or run `hf auth login`)",
                )
            return AccessError(
                f"{self.model}: your account has not been given access",
                hint=f"accept the terms at {page}, then pull again",
            )
        if isinstance(error, DisabledRepoError):
            return AccessError(f"{self.model} has been disabled on the Hub", hint=f"see {page}")
        if status == 401:
            return self._unauthorised(has_token=has_token)
        if isinstance(error, RepositoryNotFoundError) or status == 404:
            return ModelNotFoundError(f"the Hub has no model named {self.model}", hint=self._near())
        return TileinferError(f"{endpoint()} answered {status} for {self.model}", hint="try again later")

    def _unauthorised(self, *, has_token: bool) -> TileinferError:
        """The Hub answers 401 for what does not exist, too, to anyone it does not know."""
        if has_token:
            return AccessError(f"{self.model}: the Hub refused the token", hint="make a new one and set HF_TOKEN")
        near = self._near()
        return AccessError(
            f"{self.model} is private or does not exist, and no token is set",
            hint="check the name" + (f" ({near})" if near else "") + ", or set HF_TOKEN (or run `hf auth login`)",
        )

    def _near(self) -> str | None:
        near = nearest(self.model, self.store.known_names()) if self.store else []
        return f"did you mean {' or '.join(near)}?" if near else None
