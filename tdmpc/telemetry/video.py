"""Videos of evaluation, one file a round.

    <folder>/<step>.mp4

They are an extra: whatever goes wrong with one is said once, and ends neither the evaluation nor the run.
"""

import contextlib
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from fractions import Fraction
from pathlib import Path
from typing import Protocol, Self

import numpy as np
from imageio_ffmpeg import get_ffmpeg_exe

_PATIENCE_S = 60.0  # for ffmpeg to end
_MP4 = (
    # What every player and browser knows; it needs even sizes.
    *("-c:v", "libx264", "-preset", "veryfast", "-pix_fmt", "yuv420p", "-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2"),
    # Frames come more slowly than one thread encodes, and the other cores are busy with what is filmed.
    *("-threads", "1"),
    *("-movflags", "+faststart", "-f", "mp4"),
)


class VideoError(RuntimeError):
    """A video that could not be written; the message is one line."""


class Filming(Protocol):
    """What films a round."""

    def film(self, step: int) -> AbstractContextManager[Callable[[], None]]:
        """Film a round; what it yields takes one picture a call."""
        ...


class NoVideos:
    """Film nothing."""

    def film(self, step: int) -> AbstractContextManager[Callable[[], None]]:
        """Take no pictures."""
        return contextlib.nullcontext(lambda: None)


class Videos:
    """Film rounds of evaluation into `<folder>/<step>.mp4`.

    Args:
        folder: where they go, made with the first one.
        render: takes a picture `[H, W, 3]` uint8, or raises.
        fps: pictures a second at which they are shown.
        warn: told the first time that a video fails; the next rounds are tried again, silently.
        finished: told the step and the file of every video that is complete.
        section: brackets what takes time, by the name `video`, for whoever wants to measure it.
    """

    def __init__(
        self,
        folder: Path,
        render: Callable[[], np.ndarray],
        fps: float,
        warn: Callable[[str], None],
        finished: Callable[[int, Path], None] = lambda step, path: None,
        section: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self._folder, self._render, self._fps = folder, render, fps
        self._warn, self._finished, self._section = warn, finished, section
        self._warned = False

    @contextlib.contextmanager
    def film(self, step: int) -> Iterator[Callable[[], None]]:
        """Film a round; what it yields takes one picture a call, and raises nothing.

        An exception of the round itself passes, and leaves no video.
        """
        path = self._folder / f"{step}.mp4"
        take = _Take(VideoFile(path, self._fps), self._render)

        def take_picture() -> None:
            with self._section("video"):
                take.picture()

        with take.video:
            yield take_picture
            with self._section("video"):
                take.finish()
        if take.error is not None:
            self._warn_once(path, take.error)
        elif take.video.frames:
            self._finished(step, path)

    def _warn_once(self, path: Path, error: Exception) -> None:
        if not self._warned:
            reason = " ".join(f"{error}".split()) or type(error).__name__
            self._warn(f"no video {path}: {reason}; the run goes on, and further failures are not shown")
        self._warned = True


class _Take:
    """One attempt at a video, which ends with its first error."""

    def __init__(self, video: "VideoFile", render: Callable[[], np.ndarray]) -> None:
        self.video, self._render = video, render
        self.error: Exception | None = None

    def picture(self) -> None:
        self._attempt(lambda: self.video.add(self._render()))

    def finish(self) -> None:
        self._attempt(self.video.finish)

    def _attempt(self, action: Callable[[], None]) -> None:
        if self.error is not None:
            return
        try:
            action()
        except Exception as error:
            self.error = error
            self.video.discard()


class VideoFile:
    """An MP4 file (H.264) that is there only when it is complete.

    Frames go to an encoder as they come, and from it to `<name>.part` beside the file; none is kept. As a context, it
    is discarded at the end unless it was finished.

    Args:
        path: the file; its folder is made. A video of that name is replaced.
        fps: frames a second.
    """

    def __init__(self, path: Path, fps: float) -> None:
        self.path = path
        self.frames = 0
        self._part = path.with_suffix(".part")
        self._fps = Fraction(fps).limit_denominator(1000)
        self._shape: tuple[int, ...] = ()
        self._encoder: _Encoder | None = None

    def add(self, frame: np.ndarray) -> None:
        """Append a frame `[H, W, 3]` uint8; all have the size of the first.

        Raises:
            VideoError: the encoder gave up, or the frame has another size.
            OSError: the folder cannot be made, or the encoder not be started.
        """
        if self._encoder is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._shape = frame.shape
            self._encoder = _Encoder(self._part, frame.shape[1], frame.shape[0], self._fps)
        if frame.shape != self._shape:
            raise VideoError(f"a frame is {frame.shape}, the first was {self._shape}")
        self._encoder.write(np.ascontiguousarray(frame))
        self.frames += 1

    def finish(self) -> None:
        """Let the file appear under its name; without a frame there is none.

        Raises:
            VideoError: the encoder failed or did not end.
            OSError: the file cannot be renamed.
        """
        if self._encoder is not None:
            self._encoder.finish()
            self._part.replace(self.path)

    def discard(self) -> None:
        """Stop, and remove what is not finished; raises nothing."""
        encoder, self._encoder = self._encoder, None
        if encoder is not None:
            encoder.close()
            with contextlib.suppress(OSError):
                self._part.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()


class _Encoder:
    """A process of ffmpeg that reads raw frames.

    It is run from here and not by imageio, which takes a file for good even if ffmpeg has failed.
    """

    def __init__(self, path: Path, width: int, height: int, fps: Fraction) -> None:
        frames = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-video_size", f"{width}x{height}", "-framerate", f"{fps}")
        command = [get_ffmpeg_exe(), "-loglevel", "error", "-y", *frames, "-i", "pipe:0", *_MP4, f"file:{path}"]
        # A file, since a pipe that nobody reads could block ffmpeg.
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._complaints,
                start_new_session=True,  # Ctrl-C is for this process to act upon
            )
        except BaseException:
            self._complaints.close()
            raise

    def write(self, frame: np.ndarray) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(frame.data)
        except OSError as error:
            raise self._failure() from error

    def finish(self) -> None:
        if self._exit_code() != 0:
            raise self._failure()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._complaints.close()

    def _exit_code(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=_PATIENCE_S)  # closes its input, which is the end of the video
        return self._process.returncode

    def _failure(self) -> VideoError:
        code = self._exit_code()
        if code is None:
            return VideoError(f"ffmpeg did not end within {_PATIENCE_S:.0f} s")
        self._complaints.seek(0)
        complaints = self._complaints.read().decode(errors="replace").splitlines()
        return VideoError(f"ffmpeg ended with exit code {code}: {complaints[-1] if complaints else 'no reason given'}")
