"""Checkpoint managers broken on purpose: this project's own, each with one small edit.

Each is named for what is wrong with it and for the check that must catch it. They are classes at
the top of a module because rank processes import them. Most spoil something only where one check
looks, so that taking that check away lets them live.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from conformance import Subject
from tests.specimens import (
    managers_optimizer,
    managers_ranks,
    managers_resume,
    managers_saves,
)
from tests.specimens.specimen import Specimen

# Enough for every fault here: rows, columns, and stages with other keys.
DEGREES = ("fsdp2", "tp2", "pp2")
# What is wrong on one rank already needs no split at all.
UNSPLIT = ("1",)
_MODULES = (managers_ranks, managers_resume, managers_saves, managers_optimizer)
# Name, check, what a finding must name, the kinds of fault; the class is named alike.
_ALONE = """
reshard.full            ShardsOfTheNeighbour           tok_embeddings.weight   GEO-09, GEO-11
reshard.full            MomentsNotResharded            exp_avg                 GEO-08
reshard.full            MomentsUnderOtherNames         layers.11.attention.wo  OPT-18
reshard.full            BufferOfTheFirstRankOnly       tid2eid                 GEO-01
reshard.full            EqualShardsAreCopies           layers.1.attention_norm  GEO-06
reshard.next-step       RatesFromWhereItStopped        .lr                     REF-01
reshard.dataloader      PositionDropped                dataloader              DAT-01
reshard.replicas        RanksNotCompared               extra.value             GEO-01, DAT-05
reshard.hf              ExportsShardByShard            w1.weight  FUS-01, LAY-01, HFS-07
seed.alone              SeedWaitsForOthers             no answer in             SEL-04
seed.ranks              SeedOnTheFirstRankOnly         tok_embeddings.weight   GEO-01, GEO-12
seed.fresh              SeedWithPosition               dataloader              SEL-08
seed.one-rank           SeedByMany                     create_seed_checkpoint  SEL-07
seed.other-model        SeedLoadsWhatFits              layers.3.extra          STR-01
seed.other-model        SeedOfAnotherShape             router.gate             STR-04
seed.other-model        SeedOfAnotherDtype             layers.4.attention.q_norm  DTY-05
resume.newest           NewestAsPaddedText             model                   STP-06
resume.newest           NewestByTime                   model                   STP-06
resume.names            AnyNameWithAStep               step-11.tmp             STP-06, PRG-04
resume.unfinished       EmptyFolderIsAStep             step folder             STP-02
resume.half-deleted     MarkerIsEnough                 .distcp                 STP-02, ASY-01
resume.load-step        AbsentIsNewest                 step-7                  STP-05
resume.initial          EmptyFolderIsAResume           initial_load_path       STP-04
resume.initial          InitialPathWins                initial_load_path       SEL-06
resume.initial          WithoutAdapterFromScratch      initial_load_in_hf      BUF-01
resume.model-only       ModelOnlyIsAStep               step-2                  STP-02
resume.uninterrupted    SecondResumeIsTheFirst         dataloader              REF-05, DAT-02
resume.again            CopyCallsItself                recursion               OPT-09
resume.replicas         NewestRecordOfTheReplica       dataloader              STP-01
resume.stream           EpochFromTheBeginning          dataloader              DAT-03
resume.stream           RestOfTheSampleLost            dataloader              DAT-03
resume.stream           ListsAsLongAsTheTargets        dataloader              DAT-04
resume.async            SecondSaveDoesNotWait          model                   ASY-05
resume.pinned           PinsWhatComesLater             model                   ASY-07, ASY-08
resume.modes            PinnedRefusesNumpy             extra.value             ASY-02
resume.begun            BegunStepsCount                step-1                  ASY-03
resume.begun            RemovesWhatIsNotDone           step-4                  PRG-01
resume.overwrite        OverwritesInPlace              step-2                  ASY-01
resume.async-error      FailsInSilence                 async_mode              ASY-09
resume.async-load       NothingWhileSaving             model                   ASY-06
resume.retention        PurgesWhateverLooksLikeAStep   old-step-50             PRG-04
resume.retention        SeedIsTheOldestStep            step-0                  PRG-05
resume.retention        PurgeEndsAtTheFirstFailure     step-2                  PRG-03
resume.export-dtype     ExportDtypeIgnored             norm.weight             DTY-01
exclude.subsets         CounterLoadedAnyway            train_state             SEL-06
exclude.subsets         SchedulerTakesTheCounterAlong  train_state             SEL-06
exclude.subsets         ForbidsWhatIsAllowed           train_state             SEL-03
exclude.unknown         UnknownNamesIgnored            data_loader             SEL-01
exclude.coupled         OptimizerWithoutScheduler      lr_scheduler            SEL-02
optimizer.none          NoneBecomesZeros               max_exp_avg_sq          OPT-05
optimizer.none-over-moments  NoneOverMoments           exp_avg                 OPT-05
optimizer.gradients     LostWhereGradientsAre          exp_avg                 OPT-16
optimizer.stateless     StateMadeUp                    momentum_buffer         OPT-04
optimizer.dtypes        StateInTheParametersDtype      .low                    OPT-01, OPT-19
optimizer.dtypes        StepAsATensor                  .step                   DAT-07
optimizer.by-name       PairedByPosition               exp_avg                 OPT-08, OPT-13
optimizer.tied          StateUnderTheFirstName         lm_head.weight.exp_avg  OPT-06
optimizer.tied          TieBrokenByTheLoad             lm_head.weight          TIE-06
optimizer.groups        EmptyGroupForgotten            betas                   OPT-15
optimizer.groups        FirstRateForgotten             initial_lr              OPT-17
optimizer.older-file    NewHyperparameterMissing       decoupled_weight_decay  OPT-14
optimizer.older-file    MissingMomentWithoutAName      exp_avg                 OPT-03
optimizer.no-gradient   StateForEveryParameter         layers.11.attention.wo  OPT-10
optimizer.frozen        FrozenIsForgotten              layers.11.attention.wo  OPT-02
optimizer.frozen        LeftStateForgotten             layers.11.attention.wo  OPT-02
optimizer.swapped       HostMemoryForgotten            exp_avg                 OPT-05
optimizer.swapped       PlaceholdersOverMoments        exp_avg                 OPT-05
optimizer.swapped       WaitingCountForgotten          layers.11.attention.wo.weight.step  OPT-17
optimizer.emptied       EmptiedIsZeros                 exp_avg                 OPT-05
"""
# What others see too.
_SHARED = """
seed.alone              SeedOnlyWithAnExport           create_seed_checkpoint  SEL-06
reshard.full            PlainTensorsRefused            is no DTensor           STR-03
resume.newest           NewestAsText                   model                   STP-06
resume.uninterrupted    SchedulerForgotten             lr_scheduler            DAT-06
resume.uninterrupted    MomentsForgotten               exp_avg                 OPT-07
resume.uninterrupted    DataloaderForgotten            dataloader              DAT-02
resume.async            SavesWhatComesLater            model                   ASY-07, ASY-08
optimizer.none          TorchFlattening                NoneType                OPT-05
"""


def _specimens(table: str, *, alone: bool) -> Iterator[Specimen]:
    for line in table.strip().splitlines():
        check, kind, key, kinds = re.split(r" {2,}", line)
        name = re.sub(r"(?<!^)(?=[A-Z])", "-", kind).lower()
        edited = next(getattr(m, kind) for m in _MODULES if hasattr(m, kind))
        degrees = DEGREES if hasattr(managers_ranks, kind) else UNSPLIT
        make = partial(Subject, name, manager=edited, degrees=degrees)
        yield Specimen(name, check, key, kinds=kinds, alone=alone, make=make)


SPECIMENS = (*_specimens(_ALONE, alone=True), *_specimens(_SHARED, alone=False))
