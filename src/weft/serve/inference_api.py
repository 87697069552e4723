"""HTTP version of the open inference protocol (KServe v2).

It serves server metadata at `/v2`, model metadata, and inference at `/v2/models/NAME/infer`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft import __version__
from weft.errors import DataError
from weft.protocol.tensors import LENGTH_HEADER, compute_header_size, pack, read_flag, read_tensors
from weft.serve.asgi import HttpExchange, RequestRefused
from weft.serve.background import BackgroundWork
from weft.serve.metrics import ServerMetrics
from weft.serve.served_model import IDS, PLATFORM, VERSION, ServedModel

MODEL = re.compile(
    r"/v2/models/(?P<name>[^/]+)(/versions/(?P<version>[^/]+))?(?P<rest>/ready|/infer|/config)?"
)
EXTENSIONS = ["binary_tensor_data"]


@dataclass(frozen=True)
class InferenceEndpoint:
    """Endpoint for the metadata of all served models, and for inference with these models.

    `most_load` limits the load of each model, which is the number of its unfinished completions and
    unscored token sequences. Requests above the limit are refused.
    """

    models: Mapping[str, ServedModel]
    metrics: ServerMetrics
    most_load: int
    background: BackgroundWork

    def describe_server(self) -> dict[str, Any]:
        """Return the server's metadata."""
        return {"name": PLATFORM, "version": __version__, "extensions": EXTENSIONS}

    def get_model(self, name: str, version: str | None) -> ServedModel:
        """Return the model with this name and version.

        Raises `RequestRefused` if there is no such model.
        """
        if name not in self.models or version not in (None, "", VERSION):
            label = name if version in (None, "") else f"{name} version {version}"
            raise RequestRefused(
                404, f"unknown model {label[:80]!r}; this server has {', '.join(self.models)}"
            )
        return self.models[name]

    async def answer_request(
        self, exchange: HttpExchange, body: bytes, served: ServedModel
    ) -> None:
        """Answer an inference request for the model `served`.

        Raises `RequestRefused` if the request is invalid or the model is overloaded.
        """
        try:
            size = compute_header_size(body, _read_header_length(exchange))
            header = await self.background.read(body[:size])
            inputs = await self.background.run(read_tensors, body, size, header, "inputs")
            wanted, binary = _read_outputs(header, served)
            parameters = header.get("parameters") or {}
            if not isinstance(parameters, Mapping):
                raise DataError("parameters must be an object")
            tensors = await exchange.await_unless_disconnected(
                self.infer(served, inputs, parameters)
            )
        except DataError as error:
            raise RequestRefused(400, str(error)) from None
        head = {"model_name": served.name, "model_version": VERSION}
        if header.get("id") is not None:
            head["id"] = header["id"]
        outputs = {name: tensors[name] for name in wanted}
        raw, length = await self.background.run(pack, head, "outputs", outputs, binary)
        if length is None:
            await exchange.reply(200, raw)
        else:
            await exchange.reply(
                200, raw, "application/octet-stream", {LENGTH_HEADER.lower(): str(length)}
            )

    async def infer(
        self, served: ServedModel, inputs: Mapping[str, Any], parameters: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Run inference with a model, and return its output tensors by name.

        Raises `DataError` for invalid inputs, and `RequestRefused` if the model is overloaded.
        """
        if served.worker.load + len(inputs.get(IDS, ())) > self.most_load:
            raise RequestRefused(
                429, "the server is at its load limit; try again later", code="overloaded"
            )
        outputs = await served.infer(inputs, parameters, self.background)
        self.metrics.count_tokens(scored=int(inputs[IDS].size))
        return outputs


def _read_header_length(exchange: HttpExchange) -> int | None:
    text = exchange.headers.get(LENGTH_HEADER.lower())
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,12}", text):
        raise DataError(f"{LENGTH_HEADER} must be a whole number")
    return int(text)


def _read_outputs(header: Mapping[str, Any], served: ServedModel) -> tuple[list[str], set[str]]:
    """Return the names of the requested outputs, and of those to send as binary data.

    `header` is the JSON part of the request. Raises `DataError` for an output that the model does
    not have.
    """
    usual = read_flag(header, "binary_data_output", False)
    entries = header.get("outputs")
    if entries is None or entries == []:
        entries = [{"name": served.output}]
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise DataError("outputs must be a list of objects")
    for entry in entries:
        if entry.get("name") != served.output:
            raise DataError(
                f"model {served.name!r} has no output {entry.get('name')!r}; it has {served.output}"
            )
    if any(read_flag(entry, "binary_data", usual) for entry in entries):
        binary = {served.output}
    else:
        binary = set()
    return [served.output], binary
