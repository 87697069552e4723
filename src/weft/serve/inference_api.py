"""The inference protocol over HTTP: `/v2`, model metadata, `/v2/models/NAME/infer`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft import __version__
from weft.errors import DataError
from weft.protocol.tensors import LENGTH_HEADER, flag, header_size, pack, tensors_of
from weft.serve.asgi import Exchange, Refused
from weft.serve.background import BackgroundWork
from weft.serve.metrics import Metrics
from weft.serve.served import IDS, PLATFORM, VERSION, Served

MODEL = re.compile(
    r"/v2/models/(?P<name>[^/]+)(/versions/(?P<version>[^/]+))?(?P<rest>/ready|/infer|/config)?"
)
EXTENSIONS = ["binary_tensor_data"]


@dataclass(frozen=True)
class Inference:
    """Metadata and inference for all served models."""

    models: Mapping[str, Served]
    metrics: Metrics
    most_load: int
    background: BackgroundWork

    def about(self) -> dict[str, Any]:
        """Return the server's metadata."""
        return {"name": PLATFORM, "version": __version__, "extensions": EXTENSIONS}

    def model(self, name: str, version: str | None) -> Served:
        """Return the model of this name and version. Raises `Refused` if there is none."""
        if name not in self.models or version not in (None, "", VERSION):
            shown = name if version in (None, "") else f"{name} version {version}"
            raise Refused(
                404, f"unknown model {shown[:80]!r}; this server has {', '.join(self.models)}"
            )
        return self.models[name]

    async def answer(self, exchange: Exchange, body: bytes, served: Served) -> None:
        """Answer an `infer` request. Raises `Refused` for invalid requests and when overloaded."""
        try:
            size = header_size(body, _length(exchange))
            header = await self.background.read(body[:size])
            inputs = await self.background.run(tensors_of, body, size, header, "inputs")
            wanted, binary = _outputs(header, served)
            parameters = header.get("parameters") or {}
            if not isinstance(parameters, Mapping):
                raise DataError("parameters must be an object")
            made = await exchange.unless_gone(self.infer(served, inputs, parameters))
        except DataError as error:
            raise Refused(400, str(error)) from None
        head = {"model_name": served.name, "model_version": VERSION}
        if header.get("id") is not None:
            head["id"] = header["id"]
        outputs = {name: made[name] for name in wanted}
        raw, length = await self.background.run(pack, head, "outputs", outputs, binary)
        if length is None:
            await exchange.reply(200, raw)
        else:
            await exchange.reply(
                200, raw, "application/octet-stream", {LENGTH_HEADER.lower(): str(length)}
            )

    async def infer(
        self, served: Served, inputs: Mapping[str, Any], parameters: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the model's outputs by name.

        Raises `DataError` for invalid inputs and `Refused` when the model is overloaded.
        """
        if served.worker.load + len(inputs.get(IDS, ())) > self.most_load:
            raise Refused(
                429, "the server is at its load limit; try again later", code="overloaded"
            )
        made = await served.infer(inputs, parameters, self.background)
        self.metrics.tokens(scored=int(inputs[IDS].size))
        return made


def _length(exchange: Exchange) -> int | None:
    text = exchange.headers.get(LENGTH_HEADER.lower())
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise DataError(f"{LENGTH_HEADER} must be a whole number")
    return int(text)


def _outputs(header: Mapping[str, Any], served: Served) -> tuple[list[str], set[str]]:
    """Return (names of the requested outputs, those to send as bytes). Raises `DataError`."""
    usual = flag(header, "binary_data_output", False)
    asked = header.get("outputs")
    if asked is None or asked == []:
        asked = [{"name": served.output}]
    if not isinstance(asked, list) or not all(isinstance(entry, Mapping) for entry in asked):
        raise DataError("outputs must be a list of objects")
    for entry in asked:
        if entry.get("name") != served.output:
            raise DataError(
                f"model {served.name!r} has no output {entry.get('name')!r}; it has {served.output}"
            )
    if any(flag(entry, "binary_data", usual) for entry in asked):
        binary = {served.output}
    else:
        binary = set()
    return [served.output], binary
