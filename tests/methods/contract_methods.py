"""Foreign methods: correct ones, and ones that break the contract."""

from typing import Any

from freshet.core.about import About
from freshet.core.events import Contribution, Noted
from freshet.core.messages import Fresh, Slot
from freshet.core.method import Aggregate, Local, LocalRule, Method, Reject, Wait
from freshet.core.vectors import mix
from freshet.methods._shared.asynchronous import mix_upload


class Half(Method):
    """Mixes every arrival in with weight one half. It has no audit."""

    about = About("half", "async", "Half", "nobody, nowhere")

    def receive(self, server: Any, upload: Any, trip: Any) -> Any:
        return mix_upload(server, upload, trip, 0.5)


class Picky(Half):
    """Rejects odd devices."""

    def receive(self, server: Any, upload: Any, trip: Any) -> Any:
        return Reject("odd") if upload.device % 2 else mix_upload(server, upload, trip, 0.5)


class Talkative(Half):
    """Adds a note to the log."""

    def receive(self, server: Any, upload: Any, trip: Any) -> Any:
        return mix_upload(server, upload, trip, 0.5)._replace(notes=(Noted("weather", {"degrees": 21.5}),))


class GivesDict(Half):
    def receive(self, server: Any, upload: Any, trip: Any) -> Any:
        return {"weights": upload.weights, "alpha": 1.0}


class GivesNone(Half):
    def receive(self, server: Any, upload: Any, trip: Any) -> Any:
        return None


class NamesNobody(Half):
    def receive(self, server: Any, upload: Any, trip: Any) -> Any:
        return Aggregate(mix(server.weights, upload.weights, 0.5))


class AsInVersion01(Half):
    def receive(self, server: Any, upload: Any, trip: Any) -> Any:
        return Aggregate(upload.weights, {"alpha": 1.0, "update_norm": 0.1})


class NamesDevices(Half):
    def receive(self, server: Any, upload: Any, trip: Any) -> Any:
        return Aggregate(upload.weights, [upload.device])


class TakesKeys(Half):
    def receive(self, server: Any, upload: Any, trip: Any) -> Any:
        return mix_upload(server, upload, trip, 0.5, version=7, kind="mine")


class NoWeights(Half):
    def receive(self, server: Any, upload: Any, trip: Any) -> Any:
        return Aggregate(None, [Contribution(upload.device, trip.base, 1, 1.0)])


class ShortWeights(Half):
    def receive(self, server: Any, upload: Any, trip: Any) -> Any:
        return Aggregate(upload.weights[:-1], [Contribution(upload.device, trip.base, 1, 1.0)])


class RoundOfNobody(Half):
    """A synchronous method that names no contributions."""

    about = About("nobody", "sync", "Nobody", "nobody, nowhere")

    def receive(self, server: Any, upload: Any, trip: Any) -> Any:
        self.last = upload.weights
        return Wait()

    def finish_round(self, server: Any) -> Any:
        return Aggregate(self.last)


class MergesNothing(Half):
    """Its devices ask but return no numbers of their merge."""

    class Rule(LocalRule):
        def plan(self, memory: Any, assignment: Any, rng: Any) -> Slot:
            return Slot(2, "fixed")

        def merge(self, local: Local, fresh: Fresh) -> Any:
            return None

    @classmethod
    def rule(cls, options: Any) -> LocalRule:
        return cls.Rule()


#: The error message of each invalid method.
SENTENCES = {
    "GivesDict": "method GivesDict returned {'weights': array([",
    "GivesNone": "method GivesNone returned None; expected Aggregate, Discard, Reject or Wait",
    "NamesNobody": "method NamesNobody returned an Aggregate without contributions",
    "AsInVersion01": "method AsInVersion01 returned an invalid Aggregate: contributions are not all of freshet.core",
    "NamesDevices": "method NamesDevices returned an invalid Aggregate: contributions are not all of freshet.core",
    "TakesKeys": "method TakesKeys returned an invalid Aggregate: numbers are named ['kind', 'version'], which are",
    "NoWeights": "method NoWeights returned an invalid Aggregate: weights is not an array",
    "ShortWeights": "method ShortWeights returned an invalid Aggregate: weights has shape",
    "RoundOfNobody": "method RoundOfNobody returned an Aggregate without contributions",
    "MergesNothing": "Rule.merge returned None; it must return a dict of numbers, none of them named base, device,",
}
