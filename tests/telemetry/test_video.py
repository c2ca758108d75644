import contextlib
import errno
import os
import re
import subprocess

import imageio_ffmpeg
import numpy as np
import pytest

from tdmpc.telemetry import video
from tdmpc.telemetry.video import NoVideos, VideoError, VideoFile, Videos


def frame(value, height=32, width=48):
    return np.full((height, width, 3), value, np.uint8)


def read(path):
    """Return size, frames a second, and the mean of every frame."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", path, "-f", "rawvideo", "-pix_fmt", "rgb24", "pipe:1"]
    result = subprocess.run(command, capture_output=True, check=True)
    width, height, fps = re.search(r"h264.* (\d+)x(\d+).* ([\d.]+) fps", result.stderr.decode()).groups()
    frames = np.frombuffer(result.stdout, np.uint8).reshape(-1, int(height) * int(width) * 3)
    return (int(width), int(height)), float(fps), list(frames.mean(axis=1))


@pytest.fixture
def ffmpeg(monkeypatch, tmp_path):
    """Replace ffmpeg by a shell script."""

    def replace(script):
        path = tmp_path / "ffmpeg"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(path))

    return replace


class Studio:
    """Film into a folder, and keep what was said."""

    def __init__(self, folder, pictures=None):
        self.warnings, self.finished, self.number = [], [], 0
        self.videos = Videos(
            folder, pictures or self.picture, 20, self.warnings.append, lambda *video: self.finished.append(video)
        )

    def picture(self):
        self.number += 1
        return frame(self.number)

    def film(self, step, pictures=3):
        with self.videos.film(step) as take_picture:
            for _ in range(pictures):
                take_picture()


def test_a_round_becomes_a_video_of_its_step(tmp_path):
    folder = tmp_path / "run" / "videos"
    studio = Studio(folder)
    studio.film(500)
    studio.film(1000)
    assert studio.finished == [(500, folder / "500.mp4"), (1000, folder / "1000.mp4")]
    assert sorted(path.name for path in folder.iterdir()) == ["1000.mp4", "500.mp4"]
    assert studio.warnings == []


def test_all_frames_are_there_in_order_at_the_speed_asked_for(tmp_path):
    with VideoFile(tmp_path / "1.mp4", fps=100 / 3) as file:
        for value in (10, 120, 240, 60):
            file.add(frame(value))
        file.finish()
    size, fps, means = read(tmp_path / "1.mp4")
    assert (size, fps) == ((48, 32), pytest.approx(33.33, abs=0.01))
    assert means == pytest.approx([10, 120, 240, 60], abs=6)


def test_odd_sizes_and_views_of_other_arrays_are_taken(tmp_path):
    with VideoFile(tmp_path / "1.mp4", fps=10) as file:
        file.add(frame(200, 33, 47)[::-1])
        file.finish()
    assert read(tmp_path / "1.mp4")[0] == (48, 34)


def test_a_video_of_the_same_name_is_replaced_when_the_new_one_is_complete(tmp_path):
    studio = Studio(tmp_path)
    studio.film(1, pictures=2)
    with studio.videos.film(1) as take_picture:
        for _ in range(5):
            take_picture()
        assert len(read(tmp_path / "1.mp4")[2]) == 2
    assert len(read(tmp_path / "1.mp4")[2]) == 5


def test_an_interrupted_round_leaves_nothing_and_passes_on(tmp_path):
    studio = Studio(tmp_path)

    def interrupted_round():
        with studio.videos.film(1) as take_picture:
            take_picture()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted_round()
    assert list(tmp_path.iterdir()) == []
    assert studio.warnings == studio.finished == []


def test_without_a_picture_there_is_no_video(tmp_path):
    studio = Studio(tmp_path / "videos")
    studio.film(1, pictures=0)
    assert studio.warnings == studio.finished == list(tmp_path.iterdir()) == []


def test_a_picture_that_fails_is_told_once_and_later_rounds_are_tried(tmp_path):
    trouble = [RuntimeError("no\ncontext"), None, ValueError(), frame(1), frame(2)]

    def picture():
        value = trouble.pop(0)
        if isinstance(value, Exception):
            raise value
        return value

    studio = Studio(tmp_path, picture)
    studio.film(1, pictures=5)
    assert len(studio.warnings) == 1
    assert f"no video {tmp_path}/1.mp4: no context; the run goes on" in studio.warnings[0]
    assert len(trouble) == 4, "nothing is drawn for a video that has failed"
    studio.film(2)
    studio.film(3)
    studio.film(4, pictures=2)
    assert len(studio.warnings) == 1
    assert studio.finished == [(4, tmp_path / "4.mp4")]
    assert [path.name for path in tmp_path.iterdir()] == ["4.mp4"]


@pytest.mark.parametrize(
    "script",
    [
        "echo something else >&2; echo No space left on device >&2; exit 228",  # before the frames
        "cat > /dev/null; echo No space left on device >&2; exit 228",  # after the last one
    ],
)
def test_a_disk_that_is_full_is_no_video_and_no_error(tmp_path, ffmpeg, script):
    ffmpeg(script)
    studio = Studio(tmp_path / "videos")
    studio.film(1, pictures=50)
    assert "exit code 228: No space left on device" in studio.warnings[0]
    assert studio.finished == list((tmp_path / "videos").iterdir()) == []


def test_a_file_that_hits_a_real_limit_is_no_video(tmp_path, ffmpeg):
    ffmpeg(f'ulimit -f 1; exec {imageio_ffmpeg.get_ffmpeg_exe()} "$@"')
    noise = np.random.default_rng(0).integers(0, 255, (20, 64, 64, 3), np.uint8)
    studio = Studio(tmp_path / "videos", iter(noise).__next__)
    studio.film(1, pictures=20)
    assert len(studio.warnings) == 1
    assert studio.finished == list((tmp_path / "videos").iterdir()) == []


def test_an_encoder_that_hangs_is_given_up(tmp_path, ffmpeg, monkeypatch):
    ffmpeg("exec sleep 60")
    monkeypatch.setattr(video, "_PATIENCE_S", 0.1)
    studio = Studio(tmp_path)
    studio.film(1, pictures=2)
    assert "did not end" in studio.warnings[0]


def test_an_encoder_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(tmp_path / "missing"))
    studio = Studio(tmp_path)
    studio.film(1)
    assert f"{os.strerror(errno.ENOENT)}" in studio.warnings[0]


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path):
    (tmp_path / "videos").write_text("in the way")
    studio = Studio(tmp_path / "videos")
    studio.film(1)
    assert len(studio.warnings) == 1


def test_frames_of_another_size_are_refused(tmp_path):
    with VideoFile(tmp_path / "1.mp4", fps=10) as file:
        file.add(frame(1))
        with pytest.raises(VideoError, match="the first was"):
            file.add(frame(1, width=50))
    assert list(tmp_path.iterdir()) == []


def test_no_videos_takes_no_pictures():
    with NoVideos().film(1) as take_picture:
        take_picture()


def test_pictures_and_the_end_of_the_encoder_are_timed(tmp_path):
    timed = []

    @contextlib.contextmanager
    def section(name):
        timed.append(name)
        yield

    videos = Videos(tmp_path, lambda: frame(1), 20, print, section=section)
    with videos.film(0) as take_picture:
        take_picture()
        take_picture()
    assert timed == ["video"] * 3
