"""Images of prompts in SGLang 0.5.23: its server gets token ids and files, and changes no id.

SGLang's own processors need a model's Hugging Face processor, tokenize anew, and choose the size of
an image by themselves. Here the request says it: ``image_data`` are ``ImageEntry`` objects, tokens
of an image are ids of ``ImageLaw.image_token``, and the numbers are those of
``wire.models.pixels``, as the learner computes them.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream.generators.sglang.replacing import replace
from slipstream.wire.errors import ConfigError
from slipstream.wire.messages.images import ImageSpan, digest_of
from slipstream.wire.models.families.registry import engine_tensor
from slipstream.wire.models.families.tables import HF_TOWER
from slipstream.wire.models.hf_config import name_alone
from slipstream.wire.models.image_law import ImageLaw, image_law, positions_of
from slipstream.wire.models.pixels import patches

if TYPE_CHECKING:
    from torch import Tensor

PROCESSORS = "sglang.srt.managers.multimodal_processor"
HUGGING_FACE = "sglang.srt.utils.hf_transformers.processor"
QWEN2_5_VL = "sglang.srt.models.qwen2_5_vl"
QWEN3_VL = "sglang.srt.models.qwen3_vl"
_MODELS = ("Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration")
_MOST_CACHED_BYTES = 256 << 20


class ImageEntry(msgspec.Struct, frozen=True, array_like=True):
    """An image of a request to a server, as JSON in a text."""

    span: ImageSpan
    file: str  # its bytes, on the server's host


class FileImages:
    """What SGLang takes for its processor of images: it reads those of a request from files.

    Images are computed in threads, each once for the requests that come with it, and kept.
    """

    prefer_tokenized_input = True
    supports_cuda_vmm_feature_transport = False
    mm_tokens = None

    def __init__(
        self,
        module: ModuleType,
        law: ImageLaw,
        config: Any,  # noqa: ANN401
        *,
        most_bytes: int = _MOST_CACHED_BYTES,
    ) -> None:
        """Start with nothing computed.

        Args:
            module: SGLang's module of batches.
            law: Image processor of the model.
            config: Its config.json.
            most_bytes: Most memory for computed images, besides the last one.
        """
        self._module = module
        self._law = law
        self._config = config
        self._most_bytes = most_bytes
        self._computed: OrderedDict[ImageSpan, asyncio.Task[Tensor]] = OrderedDict()

    async def process_mm_data_async(
        self,
        image_data: Sequence[Any],
        input_text: list[int],
        request_obj: Any,  # noqa: ANN401
        *_more: object,
        **_named: object,
    ) -> Any:  # noqa: ANN401 SGLang's
        """Return the images of a request, whose ids stay as they are.

        Raises:
            ValueError: an image cannot be read, or its tokens are not those of the request.
        """
        if request_obj.video_data or request_obj.audio_data:
            raise ValueError("images alone can be in a prompt, no videos and no sound")
        entries = [msgspec.json.decode(entry, type=ImageEntry) for entry in image_data]
        self._check([entry.span for entry in entries], input_text)
        features = await asyncio.gather(*map(self.patches_of, entries))
        return self._output(input_text, [entry.span for entry in entries], features)

    def _check(self, spans: Sequence[ImageSpan], ids: list[int]) -> None:
        """See that every image has its tokens; others of that id are text, which a policy chose."""
        for span in spans:
            tokens = ids[span.first_token : span.end]
            known = self._law.num_tokens(span.rows, span.columns)
            if tokens != [self._law.image_token] * known:
                raise ValueError(f"tokens {span.first_token} to {span.end} are not an image's")

    async def patches_of(self, entry: ImageEntry) -> "Tensor":
        """Return the patches of an image, [rows * columns, channels] in float32.

        Raises:
            OSError: there is no such file.
            ValueError: it is not this image, or cannot be read.
        """
        key = msgspec.structs.replace(entry.span, first_token=0)
        task = self._computed.get(key)
        if task is None:
            task = asyncio.create_task(asyncio.to_thread(self._read, entry))
            self._computed[key] = task
            self._forget()
        self._computed.move_to_end(key)
        try:
            return await asyncio.shield(task)
        except (OSError, ValueError):
            self._computed.pop(key, None)
            raise

    def _forget(self) -> None:
        """Forget the images that were not asked for the longest time."""
        each = [span.rows * span.columns * self._law.channels * 4 for span in self._computed]
        held = sum(each)
        for size in each[:-1]:
            if held <= self._most_bytes:
                return
            self._computed.popitem(last=False)
            held -= size

    def _read(self, entry: ImageEntry) -> "Tensor":
        import torch  # in the server's process, not in the agent's

        content = Path(entry.file).read_bytes()
        if digest_of(content) != entry.span.digest:
            raise ValueError(f"{entry.file} is not image {entry.span.digest[:8]}")
        return torch.from_numpy(patches(content, entry.span.rows, entry.span.columns, self._law))

    def _output(
        self, ids: list[int], spans: Sequence[ImageSpan], features: Sequence["Tensor"]
    ) -> Any:  # noqa: ANN401 SGLang's
        import torch  # in the server's process

        module, config = self._module, self._config
        items = []
        for span, feature in zip(spans, features, strict=True):
            item = module.MultimodalDataItem(
                modality=module.Modality.IMAGE,
                feature=feature,
                offsets=[(span.first_token, span.end - 1)],
                model_specific_data={
                    "image_grid_thw": torch.tensor([[1, span.rows, span.columns]])
                },
            )
            # In the prefix cache an image is four numbers of 62 bits in turn, which its tokens
            # have in place of their id; the bytes alone do not decide what a model sees.
            item.set_identity(
                bytes.fromhex(digest_of(f"{span.digest} {span.rows} {span.columns}".encode()))
            )
            items.append(item)
        places = torch.from_numpy(positions_of(len(ids), spans, self._law.merge_size))
        return module.MultimodalProcessorOutput(
            mm_items=items,
            input_ids=ids,
            im_token_id=self._law.image_token,
            im_start_id=config.vision_start_token_id,
            im_end_id=config.vision_end_token_id,
            mrope_positions=places,
            mrope_position_delta=(places.max() + 1 - len(ids)).reshape(1, 1),
        )

    def clear_preprocess_cache(self) -> None:
        """Keep what was computed: no weight decides it."""

    def shutdown(self) -> None:
        """End nothing; threads end with their image."""


def read_files(module: ModuleType) -> None:
    """Have a server read images from files, and import no processor of SGLang's."""
    import importlib

    def import_processors(package_name: str, overwrite: bool = False) -> None:
        del package_name, overwrite

    def get_mm_processor(
        hf_config: Any,  # noqa: ANN401
        server_args: Any,  # noqa: ANN401
        processor: Any,  # noqa: ANN401
        transport_mode: Any,  # noqa: ANN401
        model_config: Any = None,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> FileImages:
        del processor, transport_mode, model_config, kwargs
        law = image_law(Path(server_args.model_path))
        if law is None:
            raise ConfigError(f"{server_args.model_path} has no image processor (run.model)")
        batches = importlib.import_module("sglang.srt.managers.schedule_batch")
        return FileImages(batches, law, hf_config)

    replace(module, "import_processors", import_processors)
    replace(module, "get_mm_processor", get_mm_processor)


def forget_embeddings(module: ModuleType) -> None:
    """Forget what a tower made of images when generation continues: it may be another tower now.

    SGLang keeps it across updates of weights, by the image alone. Remove when an update clears it.
    """
    import importlib

    scheduler = module.Scheduler
    proceed = scheduler.continue_generation
    schedule = importlib.import_module("sglang.srt.managers.mm_schedule")

    def continue_generation(self: Any, recv_req: Any) -> None:  # noqa: ANN401
        if schedule.embedding_cache is not None:
            schedule.embedding_cache.clear()
        proceed(self, recv_req)

    replace(scheduler, "continue_generation", continue_generation)


def load_whole_towers(module: ModuleType) -> None:
    """Load a model that sees by any names of its tensors, and refuse a folder without its tower.

    SGLang passes over tensors whose names it does not know: a tower would be left as memory was,
    and no version brings one that is not trained.
    """
    for model in vars(module).values():
        if isinstance(model, type) and model.__name__ in _MODELS:
            _load_whole_tower(model)


def _load_whole_tower(model: type[Any]) -> None:
    load = model.load_weights

    def load_weights(self: Any, weights: Any) -> None:  # noqa: ANN401
        found: set[str] = set()

        def named() -> Any:  # noqa: ANN401
            for name, tensor in weights:
                alone = name_alone(name)
                if alone.startswith(HF_TOWER):
                    found.add(alone)
                yield alone, tensor

        load(self, named())
        held = {engine_tensor(name, found).name for name in found}
        whole = {HF_TOWER + name for name, _ in self.visual.named_parameters()}
        if held != whole and not getattr(self, "_has_tower", False):  # else it is a bucket
            raise ValueError(f"{len(whole - held)} tensors of the vision tower are missing")
        self._has_tower = True

    replace(model, "load_weights", load_weights)


def tokenize_alone(module: ModuleType) -> None:
    """Have a model that sees be loaded with its tokenizer alone; no processor of its own runs."""

    def get_processor(tokenizer_name: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        kwargs = {key: kwargs[key] for key in kwargs if key in _OF_TOKENIZERS}
        return module.get_tokenizer(tokenizer_name, *args, **kwargs)

    replace(module, "get_processor", get_processor)


_OF_TOKENIZERS = ("tokenizer_mode", "trust_remote_code", "tokenizer_backend")
