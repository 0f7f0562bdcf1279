"""Twenty SIGKILLs at random moments leave nothing that changes a table by a byte."""

import random

import pytest

from kitty.records import read_record

KILLS = 20


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_no_byte_of_the_tables(finished, tmp_path):
    moments = random.Random(20)
    pipeline, kills, rounds = None, 0, 0
    while kills < KILLS:
        if pipeline is None:
            rounds += 1
            folder = tmp_path / str(rounds)
            folder.mkdir()
            pipeline = type(finished)(folder)
        # Up to the length of a whole run, so that every stage is hit, its very end included.
        if pipeline.run_and_kill(moments.uniform(0.2, 40)):
            kills += 1
            for path in (pipeline.root / "records").rglob("*.json"):
                if not path.name.startswith("."):
                    read_record(path)  # whole at any moment
        else:
            assert pipeline.tables() == finished.tables()
            pipeline = None
    if pipeline is not None:
        done = pipeline.run()
        assert done.returncode == 0, done.stderr
        assert pipeline.tables() == finished.tables()
    print(f"{kills} kills in {rounds} rounds")
