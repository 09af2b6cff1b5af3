"""`/model NAME`: another model takes over the conversation. If it can't, the old one goes on.

Two models need not fit into memory side by side, so the old one is let go before the new one's weights are read. What
can be refused without them is refused before: an unknown name, a damaged or unsupported model, one that can't chat.
"""

from __future__ import annotations

import signal
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tileinfer_cli import opening
from tileinfer_cli.render import print_error
from tileinfer_core.errors import ModelError, TileinferError

if TYPE_CHECKING:
    from pathlib import Path

    from tileinfer_cli.commandline import Cli
    from tileinfer_cli.options import ModelFlags
    from tileinfer_core.engine import Engine
    from tileinfer_core.session import Session
    from tileinfer_core.settings import Settings
    from tileinfer_core.store import ModelFolder


@dataclass(frozen=True)
class Models:
    """Loads models by the flags and settings that the chat was started with."""

    cli: Cli
    where: ModelFlags
    settings: Settings
    quiet: bool

    def open(self, reference: str | None) -> Engine:
        return self._load(opening.find_model_to_run(self.cli, self.settings, reference))

    def replace(self, session: Session, reference: str) -> None:
        """
        Raises:
            TileinferError, KeyboardInterrupt: the session has its old model, and goes on with it.
        """
        folder = opening.find_model(self.cli, self.settings, reference)
        self._check(folder)
        old = session.engine
        try:
            old.close()
            session.adopt(self._load(folder))
        except BaseException as error:
            if session.engine is old:  # else Ctrl-C came when all was done
                traceback.clear_frames(error.__traceback__)  # what they have of the new model fills the GPU
                self._restore(session, old.folder)
            raise

    def _restore(self, session: Session, folder: ModelFolder | Path) -> None:
        """Without the old model there is nothing to chat with: the chat ends with the code of what prevents it."""
        try:
            session.adopt(self._load(folder))
        except KeyboardInterrupt:
            raise SystemExit(128 + signal.SIGINT) from None
        except TileinferError as error:
            print_error(self.cli.streams.err, str(error), error.hint)
            raise SystemExit(error.exit_code) from None

    def _load(self, folder: ModelFolder | Path) -> Engine:
        options = opening.engine_options(self.where, self.settings)
        return opening.load_engine(self.cli, folder, options, quiet=self.quiet)

    def _check(self, folder: ModelFolder) -> None:
        from tileinfer_core.engine import check_model

        if check_model(folder, opening.engine_options(self.where, self.settings)).template is None:
            raise ModelError(
                f"{folder.path}: this model has no chat template, so it can't chat", hint="the old model goes on"
            )
