"""The coordinator's name table against the published page, and against the real objects, in both directions."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "seed-names-coordinator.md"

pytestmark = pytest.mark.skipif(not TABLE.is_file(), reason="the documentation is not beside an installed package")

# Every name of the published page: class -> its members, in the page's order; `()` constructs, `~` destroys.
POLICY_HOOKS = "name onPrefillFinalized onDecodeCompleted"
PAGE = {
    "ContextCacheCoordinator": "() ~ beginRequest admitSequence finalizeSequenceAdmission retractSequenceAdmission "
    "preparePrefill enqueuePrefillCaptures finalizePrefillPublication publishHybridMtpEndpoint "
    "restoreHybridMtpBoundaryHidden prepareDecodeStep completeDecodeStep beginBatchCompaction compactBatch finish "
    "shutdown metrics manager supportsLiveSequenceAdmission StreamSynchronizer",
    "AcquireSequenceResult": "lease status plan forcedCold",
    "AdmissionResult": "request prefillStarts",
    "AdmitSequenceResult": "status insufficientCapacity prefillStart",
    "BeginRequestResult": "status admission",
    "BaseEndpointPolicy": f"() {POLICY_HOOKS}",
    "EagleSpecPolicy": f"() {POLICY_HOOKS} onTerminalize",
    "HybridMtpPolicy": "() name publishMtpBoundary restoreMtpBoundary",
    "HybridSnapshotPolicy": f"() {POLICY_HOOKS}",
    "PublicationPolicy": f"() ~ {POLICY_HOOKS} onTerminalize publishMtpBoundary restoreMtpBoundary",
    "SharedKvSpecPolicy": f"() {POLICY_HOOKS} onTerminalize",
    "RequestHandle": "move copy ~ valid Impl",
    "Impl": "Phase () admitted executing hasPendingDeviceWork awaitingFirstSpecCompletion beginPrefill "
    "markDeviceWorkEnqueued markDeviceWorkSynchronized markDeviceWorkResolvedWithoutSync beginSpecDraftInit "
    "endSpecDraftInit markFinishing requestSlot publicationPolicy owner stream speculativeRequest tokenStateContract "
    "pendingCompactionMapping pendingCompactionBatchSize pendingDeviceBatchMapping sequences",
    "Phase": "kAdmitted kExecuting kFinishing",
    "RequestSlotToken": "() move copy ~ owner",
    "SequenceState": "lease resident tokenIds keyExtras perPositionMediaHash reuseTokenLength lookupPolicy "
    "commitPolicy replayTailLength committedStateLength publishedFullBlockCount publishedExactLength commonStateLength "
    "frozenSpecPrefillLength stagedHybridPublication",
    "StagedHybridPublication": "checkpoint snapshots point",
    "ContextCachePhysicalResources": "baseCache basePageTable draftCache draftPageTable",
    "ContextCacheSequenceAdmission": "tokenIds keyExtras perPositionMediaHash resident lookupPolicy",
    "ContextCacheBatchAdmission": "sequences speculativeRequest tokenStateContract lookupPolicy commitPolicy "
    "replayTailLength",
    "ContextCacheSequenceAdvance": "acceptedTokenIds acceptedTokenCount committedStateLength kHoldCommittedStateLength",
}
# Types the page uses without describing them.
MENTIONED = (
    "ContextCacheManager ContextCacheConfig DeploymentConfig ContextCacheDeploymentProfile DecodingKvHeadroom "
    "ContextCacheLookupPolicy ContextCacheCommitPolicy ContextCacheCoordinatorStatus DecodingTokenStateContract "
    "PublicationPoint AcquireStatus BlockKeyExtras Hash128 ContextCacheMetrics CacheRequestLease ReusePlan KVPageTable "
    "ResidentRef HybridCacheManager HybridCheckpointKey HybridSnapshotReservation Tensor cudaStream_t cudaError_t"
)
# Values the page shows of enums that it does not describe.
SHOWN_VALUES = [
    "AcquireStatus::kInsufficientCapacity",
    "ContextCacheCoordinatorStatus::kRequestFailed",
    "ContextCacheLookupPolicy::kUseCache",
    "ContextCacheCommitPolicy::kIncludingGeneratedTokens",
    "DecodingTokenStateContract::kCommittedPlusLookahead",
]
ENUMS = sorted({value.split("::")[0] for value in SHOWN_VALUES} | {"PublicationPoint"})
OURS_ALONE, NOT_LISTED_THERE = "(new)", "(value)"


def page_names():
    """Every name the table must have, as it is written there."""
    names = []
    for cls, members in PAGE.items():
        names.append(cls)
        for member in members.split():
            names.append({"()": f"{cls}()", "~": f"~{cls}"}.get(member, f"{cls}::{member}"))
    return [*names, *MENTIONED.split(), *SHOWN_VALUES]


def table_rows():
    """(name on the page, our dotted name, note) of each row before the section on differing rules."""
    if not TABLE.is_file():
        return []
    text = TABLE.read_text(encoding="utf-8").split("## Rules that differ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")]
    return [(page.strip("`"), ours.strip("`"), note) for page, ours, note in rows]


ROWS = table_rows()
OURS = sorted({ours for _, ours, _ in ROWS})


@pytest.fixture(autouse=True)
def plugins_of_this_tree(monkeypatch):
    """The plugins' sources, whether they are installed or not."""
    for source in sorted((ROOT / "plugins").glob("*/src")):
        monkeypatch.syspath_prepend(source)


def look_up(dotted):
    """The object behind a dotted path: the longest importable module, then attributes and dataclass fields."""
    parts = dotted.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for name in parts[cut:]:
            if name in getattr(found, "__dataclass_fields__", {}):
                return found.__dataclass_fields__[name]
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(dotted)


def public_members(cls):
    """What a class offers of its own: methods, properties, slots and dataclass fields, enum values.

    Inherited members count for the class that first has them; a plain override is listed there as well.
    """
    if issubclass(cls, enum.Enum):
        return set(cls.__members__)
    names = set(vars(cls)) | set(getattr(cls, "__annotations__", {}))
    if dataclasses.is_dataclass(cls):
        names |= {field.name for field in dataclasses.fields(cls)}
    return {name for name in names if not name.startswith("_")}


def described_classes():
    """Our class for each class of the page, where it is a class of its own."""
    named = {page: ours for page, ours, _ in ROWS}
    return [(page, named[page]) for page in [*PAGE, *ENUMS] if page in named]


def test_every_name_of_the_page_is_in_the_table_once():
    names = [page for page, _, _ in ROWS if not page.startswith((OURS_ALONE, NOT_LISTED_THERE))]
    assert sorted(page_names()) == sorted(names)


@pytest.mark.parametrize("dotted", OURS)
def test_our_name_exists(dotted):
    look_up(dotted)


@pytest.mark.parametrize(("page", "dotted"), described_classes())
def test_every_public_member_of_ours_is_in_the_table(page, dotted):
    cls = look_up(dotted)
    assert inspect.isclass(cls)
    missing = {name for name in public_members(cls) if f"{dotted}.{name}" not in OURS}
    assert not missing, f"{page}: put these into docs/seed-names-coordinator.md: {sorted(missing)}"


def test_a_new_name_says_what_it_is_for():
    for page, ours, note in ROWS:
        if page.startswith(OURS_ALONE):
            assert note, f"{page} ({ours}) has no note"


def test_look_up_notices_a_missing_name():
    with pytest.raises(AttributeError):
        look_up("edgellm.cache.coordinator.ContextCacheCoordinator.begin_requests")
    with pytest.raises(ModuleNotFoundError):
        look_up("edgellm_nothing.policy.Policy")


def test_public_members_sees_methods_slots_fields_and_values():
    class Slotted:
        __slots__ = ("_hidden", "shown")

        def act(self):
            """A method."""

    @dataclasses.dataclass
    class Fields:
        value: int

    assert public_members(Slotted) == {"shown", "act"}
    assert public_members(Fields) == {"value"}
    assert public_members(enum.Enum("Colour", "RED")) == {"RED"}
