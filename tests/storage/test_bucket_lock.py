"""The lock of a run in a bucket, and what remains of it after a kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import object_store
from weft.errors import ConfigError
from weft.storage.bucket_lock import LOCK, BucketLock, LockOwner
from weft.storage.buckets import BucketFolder

URL = "objects://b/runs/e/t"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "objects" / "b").mkdir(parents=True)
    monkeypatch.setenv(object_store.ROOT, str(tmp_path / "objects"))
    object_store.register()
    return tmp_path


def test_the_lock_of_a_killed_process_of_this_machine_is_replaced(store: Path) -> None:
    code = (
        "import os, signal; from tests import object_store; object_store.register();"
        "from weft.storage.bucket_lock import BucketLock; from weft.storage.buckets import BucketFolder;"
        f"BucketLock(BucketFolder.open({URL!r})).take(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ})
    assert set(BucketFolder.open(URL).list_files()) == {LOCK}
    lock = BucketLock(BucketFolder.open(URL))
    lock.take()
    lock.check()
    owner = lock.read_owner()
    assert owner is not None and owner.pid == os.getpid() and owner.is_alive()


def test_the_lock_of_another_machine_stays(store: Path) -> None:
    bucket = BucketFolder.open(URL)
    owner = LockOwner("1", 2, "", "another", "elsewhere", 0.0)
    assert not owner.has_ended() and not owner.is_alive()
    for contents in (json.dumps(vars(owner)).encode(), b"?"):
        bucket.write(LOCK, contents)
        with pytest.raises(ConfigError, match=r"process 2 on elsewhere|an unknown process"):
            BucketLock(bucket).take()
        assert bucket.read(LOCK) == contents
