"""Images over the broker's socket: what arrives is what was kept, for roles that need it."""

from pathlib import Path

import pytest
from typing_extensions import override

from slipstream.broker.images import ImageFetcher, LocalImages
from slipstream.wire.errors import (
    ForbiddenError,
    HostRoomError,
    ImageError,
    ProtocolError,
    RefusedError,
)
from slipstream.wire.files.image_folder import ImageFolder
from slipstream.wire.messages.broker import Done, FetchImage, ImageBytes, StoreImage
from slipstream.wire.messages.images import digest_of
from tests.support.drawn_images import drawn
from tests.support.running_broker import running

RED, BLUE = drawn(seed=1), drawn(seed=2)


async def test_images_are_fetched_once_and_stored_before_the_answer(tmp_path: Path):
    images = ImageFolder(tmp_path / "images", most_bytes=len(RED) + len(BLUE))
    kept = images.keep(RED)
    async with running(tmp_path, images=images) as it:
        fetcher = ImageFetcher(await it.client("generator", "generator-0"))
        assert await fetcher.fetch(kept) == RED
        stored = await fetcher.store(BLUE)
        assert images.file_of(stored).read_bytes() == BLUE
        images.file_of(kept).unlink()
        assert await fetcher.fetch(kept) == RED, "it was fetched twice"
        learner = ImageFetcher(await it.client("learner", "learner"))
        assert await learner.fetch(stored) == BLUE
        with pytest.raises(ImageError, match=f"no image {kept[:8]}"):
            await learner.fetch(kept)
        images.file_of(stored).write_bytes(RED)
        scorer = ImageFetcher(await it.client("reward_worker", "worker"))
        with pytest.raises(ImageError, match="changed on disk"):
            await scorer.fetch(stored)
        with pytest.raises(ImageError, match=r"broker\.image_budget_bytes"):
            await fetcher.store(drawn(seed=3))


async def test_pixels_that_cannot_be_read_are_found_before_an_engine_is_asked(tmp_path: Path):
    images = ImageFolder(tmp_path / "images")
    whole, damaged = images.keep(RED), images.keep(BLUE[:-300])
    async with running(tmp_path, images=images) as it:
        fetcher = ImageFetcher(await it.client("generator", "generator-0"))
        assert await fetcher.fetch_readable(whole) == RED
        with pytest.raises(ImageError, match=f"image {damaged[:8]}: .* truncated"):
            await fetcher.fetch_readable(damaged)


async def test_a_small_cache_keeps_what_was_used_last(tmp_path: Path):
    images = ImageFolder(tmp_path / "images")
    kept = [images.keep(content) for content in (RED, BLUE)]
    async with running(tmp_path, images=images) as it:
        fetcher = ImageFetcher(await it.client("generator", "generator-0"), cache_bytes=len(BLUE))
        for digest in kept:
            await fetcher.fetch(digest)
            images.file_of(digest).unlink()
        assert await fetcher.fetch(kept[1]) == BLUE
        with pytest.raises(ImageError):
            await fetcher.fetch(kept[0])


async def test_other_bytes_and_other_roles_are_refused(tmp_path: Path):
    async with running(tmp_path, images=ImageFolder(tmp_path / "images")) as it:
        generator = await it.client("generator", "generator-0")
        store = StoreImage(digest=digest_of(RED))
        for frames, why in (
            ([BLUE], "other bytes came"),
            ([], "needs 1 attached"),
            ([RED, RED], "1"),
        ):
            with pytest.raises(RefusedError, match=why):
                await generator.ask(store, Done, frames=frames)
        for role in ("learner", "reward_worker"):
            other = await it.client(role, role)
            with pytest.raises(ForbiddenError, match="may not send StoreImage"):
                await other.ask(store, Done, frames=[RED])
        observer = await it.client("observer", "observer")
        with pytest.raises(ForbiddenError, match="may not send FetchImage"):
            await observer.ask(FetchImage(digest=digest_of(RED)), ImageBytes)
        assert not [*(tmp_path / "images").glob("*/*")]


class Mistaken(ImageFolder):
    @override
    def read(self, digest: str) -> bytes:
        return BLUE


async def test_bytes_of_another_image_are_no_answer(tmp_path: Path):
    images = Mistaken(tmp_path / "images")
    digest = images.keep(RED)
    async with running(tmp_path, images=images) as it:
        fetcher = ImageFetcher(await it.client("generator", "generator-0"))
        with pytest.raises(ProtocolError, match="other bytes"):
            await fetcher.fetch(digest)


async def test_a_full_disk_of_this_host_is_no_fault_of_the_image(tmp_path: Path):
    async def fetch(_digest: str) -> bytes:
        return RED

    (tmp_path / "taken").touch()  # a file in the place of the folder
    images = LocalImages(fetch, tmp_path / "taken")
    with pytest.raises(HostRoomError, match="cannot write"):
        async with images.files([digest_of(RED)]):
            pass
    images = LocalImages(fetch, tmp_path)
    async with images.files([digest_of(RED)]) as (file,):
        assert file.read_bytes() == RED
