"""The bound models of one `Triton` or `RemoteTriton`, by name and version."""

from collections.abc import Iterable

from pytriton.exceptions import PyTritonInvalidOperationError
from pytriton.server.models.service import WorkerService

__all__ = ["BoundModels"]


class BoundModels(dict[tuple[str, int], WorkerService]):
    """Bound models by `WorkerService.key`. What is in here, the callables see in their `TritonContext`."""

    def find(self, name: str, version: int | None) -> list[WorkerService]:
        """Return the bound versions of a name, or the one that is asked for.

        Raises:
            PyTritonInvalidOperationError: There are none.
        """
        models = [
            model
            for model in list(self.values())
            if model.name.lower() == str(name).lower() and version in (None, model.version)
        ]
        if not models:
            what = repr(name) if version is None else f"{name!r} of version {version!r}"
            there = sorted({f"{model.name!r} ({model.version})" for model in self.values()})
            raise PyTritonInvalidOperationError(
                f"There is no model {what}. Bound are: {', '.join(there) or 'none'}. Give the name and version that "
                "were given to bind()."
            )
        return models

    def check_same_config(self, model: WorkerService) -> None:
        """Check that Triton can serve a model beside the other versions of its name.

        Raises:
            PyTritonInvalidOperationError: One of them has other tensors or another configuration.
        """
        for other in self.values():
            if other.name != model.name or other.key == model.key:
                continue
            differences = model.definition.differences(other.definition)
            if differences:
                raise PyTritonInvalidOperationError(
                    f"Model {model.name!r}: version {model.version} differs from version {other.version} in "
                    f"{', '.join(differences)}, but Triton keeps one description for all versions of a name. Bind it "
                    "under another name."
                )

    def put(self, model: WorkerService) -> None:
        """Add a model, or let it take the place of the one with its key."""
        old = self.get(model.key)
        self[model.key] = model
        if old is not None:
            old.definition.unpublish()
            self._publish_all()

    def remove(self, models: Iterable[WorkerService]) -> None:
        """Remove models."""
        for model in models:
            del self[model.key]
            model.definition.unpublish()
        self._publish_all()

    def _publish_all(self) -> None:
        # A callable that serves several models sees the configuration of the one that was bound last.
        for model in self.values():
            model.definition.publish()
