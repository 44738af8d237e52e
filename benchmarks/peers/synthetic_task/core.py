"""What FLGo reads from a benchmark: where the samples come from, how they are stored, how a loss is computed."""

from flgo.benchmark.toolkits.cv.classification import FromDatasetGenerator, FromDatasetPipe, GeneralCalculator
from torch import Tensor
from torch.utils.data import TensorDataset
from work import samples

train_data, test_data = TensorDataset(*samples()), TensorDataset(*samples(500))


class TaskGenerator(FromDatasetGenerator):
    def __init__(self) -> None:
        super().__init__(benchmark="synthetic_task", train_data=train_data, test_data=test_data)


class TaskPipe(FromDatasetPipe):
    class TaskDataset(FromDatasetPipe.TaskDataset):
        """FLGo's own, with the method without which newer versions of torch refuse a subclass of Subset."""

        def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
            return [self[index] for index in indices]

    def __init__(self, task_path: str) -> None:
        super().__init__(task_path, train_data=train_data, test_data=test_data)


TaskCalculator = GeneralCalculator
