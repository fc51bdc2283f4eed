"""A script that all ranks run leaves the files that one process leaves, and each rank finds what one process finds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.files.scripts import run_script

from farspan.launch.files.exempt import exempt_roots, temporary_folder
from farspan.launch.files.journal import Journal
from farspan.launch.files.layers import Layer
from farspan.launch.files.view import View

WRITES = """
import csv, glob, json, logging, os, pathlib, pickle, shutil, sqlite3, tempfile
from os import remove, listdir

os.makedirs("out", exist_ok=False)
with open("out/a.txt", "w") as file:
    file.write("first\\n")
    print(file.name)
with open("out/a.txt", "a") as file:
    file.write("second\\n")
with open("out/a.txt", "r+") as file:
    file.write("F")
print(open("out/a.txt").read())
with open("exclusive", "x"):
    pass
try:
    open("exclusive", "x")
except FileExistsError as error:
    print(error)
with open("table.csv", "a", newline="") as file:
    csv.writer(file).writerow([1, 2])
print(open("table.csv").read())
pathlib.Path("out/config.json").write_text(json.dumps({"lr": 0.1}))
with open("out/state.pkl", "wb") as file:
    pickle.dump([1, 2], file)
print(pickle.load(open("out/state.pkl", "rb")), sorted(listdir("out")), sorted(glob.glob("out/*.json")))
print(sorted(str(path) for path in pathlib.Path(".").rglob("*")), sorted(each.name for each in os.scandir("out")))
os.symlink("a.txt", "out/latest")
print(os.path.islink("out/latest"), os.readlink("out/latest"), open("out/latest").read())
print(os.path.samefile("out/latest", "out/a.txt"))
os.replace("out/config.json", "out/renamed.json")
print(os.path.exists("out/config.json"), os.stat("out/renamed.json").st_size)
shutil.copy2("out/renamed.json", "out/copied.json")
shutil.copytree("out", "out2", symlinks=True)
shutil.move("out2", "moved")
print(sorted(os.listdir("moved")), os.path.isdir("out2"))
base = sqlite3.connect("results.db")
base.execute("create table if not exists runs (value)")
base.execute("insert into runs values (1)")
base.commit()
print(base.execute("select count(*) from runs").fetchall())
base.close()
logging.basicConfig(filename="out/run.log", level=logging.INFO, format="%(message)s")
logging.info("hello")
print(open("out/run.log").read())
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "x").write_text("1")
    print(os.listdir(folder))
number, scratch = tempfile.mkstemp(dir="out")
os.write(number, b"whole")
os.close(number)
os.replace(scratch, "out/atomic")
os.chmod("out/atomic", 0o600)
os.utime("out/atomic", (1, 1))
print(open("out/atomic").read(), os.path.getmtime("out/atomic"))
os.chdir("out")
print(os.path.basename(os.getcwd()), sorted(os.listdir()))
pathlib.Path("below.txt").write_text("below")
os.chdir("..")
print(os.path.isfile("out/below.txt"), os.path.realpath("out/latest").split("/")[-2:])
remove("out/a.txt")
os.makedirs("deep/er/still")
os.removedirs("deep/er/still")
folder = tempfile.mkdtemp()
pathlib.Path(folder, "inside").write_text("made elsewhere")
shutil.move(folder, "moved_in")
print(os.listdir("moved_in"), os.path.exists(folder))
with tempfile.NamedTemporaryFile("w", delete=False, dir=".") as file:
    file.write("whole")
os.rename(file.name, "complete")
print(pathlib.Path("complete").read_text())
wrong = [(open, "missing/x"), (open, "missing/x", "w"), (open, "table.csv/x"), (os.rmdir, "out"), (os.mkdir, "out")]
for function, *arguments in wrong:
    try:
        function(*arguments)
    except OSError as error:
        print(type(error).__name__, error)
print(sorted((folder, sorted(folders), sorted(files)) for folder, folders, files in os.walk(".")))
"""

CHANGES = """
import os, pathlib, shutil

counter = pathlib.Path("counter")
number = int(counter.read_text())
counter.write_text(str(number + 1))
print(number, counter.read_text())
print(os.path.exists("best.pt"), os.path.exists("old.log"))
runs = sorted(int(name[1:]) for name in os.listdir("runs"))
os.makedirs(f"runs/v{runs[-1] + 1}")
print(runs, sorted(os.listdir("runs")))
if os.path.exists("old.log"):
    os.remove("old.log")
print([path.name for path in sorted(pathlib.Path(".").iterdir())])
print(sorted(os.listdir("cache")), open("cache/deep/x").read())
shutil.rmtree("cache")
os.makedirs("cache")
print(os.listdir("cache"))
pathlib.Path("best.pt").write_text("mine")
with open("history.csv", "a") as file:
    file.write("row\\n")
print(open("history.csv").read())
print(os.readlink("latest"), sorted(os.listdir("latest")))
os.remove("latest")
os.symlink(f"runs/v{runs[-1] + 1}", "latest")
pathlib.Path("latest/inside").write_text("in")
print(sorted(os.listdir("latest")), os.path.realpath("latest").split("/")[-2:])
os.rename("renamed_folder", "other_name")
print(open("other_name/y").read(), os.path.exists("renamed_folder"))
os.replace("other_name/y", "best.pt")
print(open("best.pt").read())
"""


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """What is there before the script starts."""
    folder = tmp_path / "start"
    for name in ("runs/v1", "cache/deep", "renamed_folder"):
        (folder / name).mkdir(parents=True)
    texts = {"counter": "7", "old.log": "old", "cache/deep/x": "x", "history.csv": "head\n", "renamed_folder/y": "y"}
    for name, text in texts.items():
        (folder / name).write_text(text)
    (folder / "latest").symlink_to("runs/v1")
    return tmp_path


def test_what_a_script_writes_is_there_once_and_every_rank_reads_its_own(tmp_path: Path) -> None:
    alone = run_script(tmp_path, WRITES, 1)
    together = run_script(tmp_path, WRITES, 3)
    assert together.files == alone.files
    assert together.printed == alone.printed * 3
    assert not list(tmp_path.glob("**/*farspan*"))


@pytest.mark.parametrize("late", [0, 1])
def test_every_rank_starts_from_the_same_files_however_far_the_others_are(start: Path, late: int) -> None:
    alone = run_script(start, CHANGES, 1)
    together = run_script(start, CHANGES, 2, late=late)
    assert together.files == alone.files
    assert together.printed == alone.printed * 2


def test_all_ranks_write_where_that_is_asked_for(tmp_path: Path) -> None:
    text = "import os\nopen('rank' + os.environ['FARSPAN_RANK'], 'w').close()"
    assert set(run_script(tmp_path, text, 2, files="all").files) == {"rank0", "rank1"}
    assert set(run_script(tmp_path, text, 2).files) == {"rank0"}


LARGE = """
try:
    print(len(open("large").read(10)))
except OSError as error:
    print(error)
open("large", "w").close()
"""


def test_what_is_too_large_to_be_kept_is_never_read_as_something_else(tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    with open(tmp_path / "start" / "large", "wb") as file:
        file.truncate(1 << 26)
    first, second = run_script(tmp_path, LARGE, 2, late=1).printed
    assert first == "10\n"
    assert "rank 0 has written over this file" in second and second.endswith("'large'\n")


PROCESSES = """
import multiprocessing, os, subprocess, sys
from pathlib import Path

def child(name):
    Path(name).write_text(name + Path("own").read_text())

if __name__ == "__main__":
    Path("own").write_text("!")
    for method in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=child, args=(method,))
        process.start()
        process.join()
        print(process.exitcode, Path(method).read_text())
    with multiprocessing.Manager() as manager:  # has a socket in a temporary folder
        print(manager.list([1, 2])[1])
    subprocess.run([sys.executable, "-c", "open('by_python', 'w').write(open('own').read())"], check=True)
    print(open("by_python").read())
"""


def test_processes_that_a_rank_starts_have_its_files(tmp_path: Path) -> None:
    alone = run_script(tmp_path, PROCESSES, 1)
    together = run_script(tmp_path, PROCESSES, 2)
    assert together.files == alone.files
    assert together.printed == alone.printed * 2


@pytest.mark.skipif(not os.path.exists("/proc/self/ns/net"), reason="the network's namespace has no name here")
def test_links_of_the_kernel_that_lead_to_no_path_can_be_followed(tmp_path: Path) -> None:
    for name in ("own", "before"):
        (tmp_path / name).mkdir()
    own, before = Layer(str(tmp_path / "own")), Layer(str(tmp_path / "before"))
    view = View(own, before, exempt_roots(str(tmp_path)))
    entrance, exit = os.pipe()
    for name in ("ns/net", f"fd/{exit}"):
        assert os.path.samefile(view.canonical(f"/proc/self/{name}", follow=True), f"/proc/self/{name}")
    assert view.canonical("/proc/self/cwd/x", follow=True) == os.path.realpath("x")
    os.close(entrance)
    os.close(exit)


def test_what_the_first_rank_moves_is_for_the_others_where_it_was(tmp_path: Path) -> None:
    folder = os.path.realpath(tmp_path)
    own, before = Layer(f"{folder}/own"), Layer(f"{folder}/before")
    view = View(own, before, exempt_roots(folder))
    view.become_first(Journal(before, ()))
    source, target = f"{folder}/a", f"{folder}/b"
    Path(source).write_text("text")
    view.move(source, target)
    assert Path(target).read_text() == "text" and not os.path.exists(source)
    assert Path(before.path(source)).read_text() == "text" and not before.is_gone(source)
    assert before.is_gone(target)


@pytest.mark.parametrize("name", ["USER", "LOGNAME"])
def test_caches_named_after_the_user_are_those_of_all_ranks(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for each in ("USER", "LOGNAME"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "ada")
    assert f"{os.path.realpath(temporary_folder())}/torchinductor_ada" in exempt_roots("/a-run")
