"""The web page of a model that transcribes audio, in a real browser: files, recordings, and streamed text."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from penstock_frontend.processing.media.decode import decode_sound
from penstock_frontend.processing.media.worker_messages import DecodeLimits
from tests.fakes.clients.browser import CHROMIUM, Browser, Tab
from tests.fakes.frontends.page_server import CUT, HOLD, PageServer
from tests.fakes.media_files import sound_file
from tests.fakes.patience import PATIENCE

pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium on PATH (apt-get install chromium): the page in a browser"
    ),
    pytest.mark.asyncio(loop_scope="module"),
]

PATH = "/v1/audio/transcriptions"
SHOWS_ERROR = "!document.querySelector('#error').hidden"
GIVE = """(() => {
  const data = new DataTransfer(), bytes = Uint8Array.from(atob(%r), (c) => c.charCodeAt(0));
  data.items.add(new File([bytes], %r, { type: "audio/wav" }));
  %s;
})()"""
DROP = (
    "document.querySelector('#playground').dispatchEvent(new DragEvent('drop', "
    "{ dataTransfer: data, bubbles: true, cancelable: true }))"
)
CHOOSE = (
    "document.querySelector('#soundFile').files = data.files; "
    "document.querySelector('#soundFile').dispatchEvent(new Event('change'))"
)


def shows(selector: str, text: str) -> str:
    return f"document.querySelector({selector!r}).innerText.includes({text!r})"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Browser]:
    async with Browser(tmp_path_factory.mktemp("browser")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def server() -> AsyncIterator[PageServer]:
    async with PageServer(speech=True, media=["audio"], chat=False, tools=False) as running:
        running.pieces = [" Hello", " <b>there</b>."]
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def tab(browser: Browser, server: PageServer) -> AsyncIterator[Tab]:
    tab = await browser.open(server.url)
    await tab.until("document.querySelector('[value=speech]').checked")
    yield tab
    assert not [text for text in tab.complaints() if "Failed to load resource" not in text]
    await browser.close_tabs()


async def give(tab: Tab, how: str, name: str = "a.wav") -> None:
    await tab.value(GIVE % (base64.b64encode(sound_file()).decode(), name, how))
    await tab.until(shows("#soundName", name))


@pytest.mark.parametrize("how", [DROP, CHOOSE], ids=["dropped", "chosen"])
async def test_a_file_is_sent_and_its_text_is_shown(tab: Tab, server: PageServer, how: str) -> None:
    assert await tab.text("#soundName") == "No audio is chosen."
    await give(tab, how)
    await tab.click("#run")
    await tab.until(shows("#numbers", "took"))
    assert await tab.text("#output") == "Hello <b>there</b>."
    assert "3 s" in await tab.text("#numbers")
    assert server.requests == [(PATH, {"file": sound_file(), "model": "tiny", "stream": "true"})]


async def test_only_controls_for_speech_are_shown(tab: Tab) -> None:
    hidden = "[...document.querySelectorAll(%s)].every((each) => each.offsetParent === null)"
    others = "#prompt, #other, #settings, #attach, [value=chat], [value=completion], [value=embedding]"
    assert await tab.value(hidden % json.dumps(others))
    assert await tab.text("#run") == "Transcribe"
    named = "[...document.querySelectorAll('#speech select, #speech input')].every((each) => each.labels.length === 1)"
    assert await tab.value(named)
    assert await tab.value("document.querySelector('#soundName').getAttribute('role')") == "status"


async def test_the_task_and_the_language_are_sent(tab: Tab, server: PageServer) -> None:
    await give(tab, DROP)
    await tab.value("document.querySelector('#task').value = 'translations'")
    await tab.write("#language", " de ")
    await tab.click("#run")
    await tab.until(shows("#numbers", "took"))
    path, fields = server.requests[0]
    assert path == "/v1/audio/translations"
    assert fields["language"] == "de"


async def test_text_is_shown_while_it_arrives_and_stop_ends_the_call(tab: Tab, server: PageServer) -> None:
    server.pieces = [" Hello", HOLD]
    await give(tab, DROP)
    await tab.click("#run")
    await tab.until(shows("#output", "Hello"))
    await tab.press("Escape")
    async with asyncio.timeout(PATIENCE):
        await server.abandoned.wait()
    await tab.until(shows("#numbers", "stopped"))
    assert await tab.text("#output") == "Hello"
    assert not await tab.value(SHOWS_ERROR)


async def test_silence_is_told(tab: Tab, server: PageServer) -> None:
    server.pieces = []
    await give(tab, DROP)
    await tab.click("#run")
    await tab.until(shows("#output", "The audio contains no speech."))


async def test_a_recording_is_sent_as_a_file_that_the_server_can_decode(tab: Tab, server: PageServer) -> None:
    await tab.click("#record")
    await tab.until(shows("#soundName", "Recording"))
    assert await tab.text("#record") == "Stop recording"
    assert await tab.value("document.querySelector('#record').getAttribute('aria-pressed')") == "true"
    assert await tab.value("document.querySelector('#run').disabled")
    await tab.value("new Promise((resolve) => setTimeout(resolve, 700))")
    await tab.click("#record")
    await tab.until(shows("#numbers", "took"))
    assert await tab.text("#soundName") != ""
    (path, fields), *others = server.requests
    assert (path, others) == (PATH, [])
    samples = decode_sound(fields["file"], 16_000, DecodeLimits(1, 1, 60.0))
    assert len(samples) > 1600
    assert "recording.webm" in await tab.text("#soundName")


async def test_without_a_microphone_the_page_says_so(tab: Tab, server: PageServer) -> None:
    await tab.value(
        "navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('x', 'NotAllowedError'); }"
    )
    await tab.click("#record")
    await tab.until(SHOWS_ERROR)
    assert "does not allow the microphone" in await tab.text("#error")
    assert not server.requests


async def test_nothing_chosen_is_told(tab: Tab, server: PageServer) -> None:
    await tab.click("#run")
    await tab.until(SHOWS_ERROR)
    assert "No audio is chosen." in await tab.text("#error")


async def test_a_file_that_cannot_be_read_is_named(tab: Tab, server: PageServer) -> None:
    error = {"message": "file is cut off", "type": "invalid_request_error", "param": "file", "code": "media_unreadable"}
    server.refusal = (400, error, {})
    await give(tab, DROP, "song.mp3")
    await tab.click("#run")
    await tab.until(SHOWS_ERROR)
    told = await tab.text("#error")
    assert "“song.mp3” cannot be read as audio." in told
    assert "file is cut off." in told


async def test_a_stream_that_is_cut_off_is_told(tab: Tab, server: PageServer) -> None:
    server.pieces = [" Hello", CUT]
    await give(tab, DROP)
    await tab.click("#run")
    await tab.until(SHOWS_ERROR)
    assert "The answer was cut off." in await tab.text("#error")
    assert "Hello" in await tab.text("#output")


async def test_the_request_is_shown_as_a_program(tab: Tab) -> None:
    await give(tab, DROP, "it's.wav")
    await tab.click("[data-form=curl]")
    shown = await tab.text("#codeText")
    assert "-F 'file=@it'\\''s.wav'" in shown
    assert "-F 'stream=true'" in shown
    await tab.value("document.querySelector('#code').close()")
    await tab.click("[data-form=Python]")
    shown = await tab.text("#codeText")
    compile(shown, "shown", "exec")
    assert 'open("it\'s.wav", "rb")' in shown
    assert "client.audio.transcriptions.create(" in shown
