"""What an export has to know of a model besides its tensors; kept with every checkpoint.

A checkpoint of ours holds tensors by name. The names of the hub's files, the class, the config and
the tokenizer are the model's, which is gone when a checkpoint is exported later.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any

from goose_strategy.compat.weights import meta_model, recall_transforms, transform_names
from goose_strategy.errors import PlanError


@dataclass(frozen=True)
class Origin:
    """What an export has to know of a model besides its tensors; plain values only.

    Attributes:
        prefix: Its name in the user's module; ``""`` for the module itself.
        kind: Name of its class.
        config: Its config as JSON.
        generation: Its generation config as JSON, if it has one.
        transforms: How its keys were changed when it was loaded, if it was.
        tokenizer: The folder that it was loaded from, if it was.
    """

    prefix: str
    kind: str
    config: str
    generation: str | None = None
    transforms: tuple[str, ...] | None = None
    tokenizer: str | None = None

    @classmethod
    def of(cls, prefix: str, model: Any) -> Origin:
        """Describe a transformers model."""
        generation = getattr(model, "generation_config", None)
        names = transform_names(model)
        source = getattr(model, "name_or_path", "") or ""
        return cls(
            prefix=prefix,
            kind=type(model).__name__,
            config=model.config.to_json_string(),
            generation=None if generation is None else generation.to_json_string(),
            transforms=None if names is None else tuple(names),
            tokenizer=os.path.abspath(source) if os.path.isdir(source) else None,
        )

    def blank(self) -> Any:
        """Build the whole model without memory.

        Raises:
            PlanError: If this version of transformers makes another class of the config.
        """
        from transformers import AutoConfig

        settings = json.loads(self.config)
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        model: Any = meta_model(config)
        if type(model).__name__ != self.kind:
            raise PlanError(
                f"transformers makes a {type(model).__name__} of the config of a {self.kind}; only "
                "causal language models can be exported."
            )
        recall_transforms(model, self.transforms)
        return model
