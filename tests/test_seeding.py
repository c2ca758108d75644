from itertools import product

from tdmpc.seeding import Seeds, Stream


def test_streams_are_distinct_over_seed_worker_stream_and_path():
    seeds = [
        Seeds(seed, worker).integer(stream, env, episode)
        for seed, worker, stream, env, episode in product(range(4), range(3), Stream, range(4), range(3))
    ]
    assert len(set(seeds)) == len(seeds)


def test_a_path_is_not_its_concatenation():
    seeds = Seeds(1)
    assert seeds.integer(Stream.TRAIN_EPISODE, 1, 0) != seeds.integer(Stream.TRAIN_EPISODE, 10)
    assert seeds.integer(Stream.TRAIN_EPISODE, 0) != seeds.integer(Stream.TRAIN_EPISODE, 0, 0)


def test_streams_are_reproducible_and_of_31_bits():
    assert Seeds(7).integer(Stream.INIT) == Seeds(7).integer(Stream.INIT)
    assert all(0 <= Seeds(s).integer(Stream.UPDATE) < 2**31 for s in range(200))
    assert Seeds(7).generator(Stream.REPLAY).random() == Seeds(7).generator(Stream.REPLAY).random()
