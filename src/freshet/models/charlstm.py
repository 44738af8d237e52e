"""CharLSTM: next-character prediction with an embedding, LSTM layers and a dense layer at every character.

The shape is that of McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, section 3, which embeds in 8 dimensions and has two layers of 256 units (``embedding_dim=8, units=256,
layers=2``). The default is smaller: 32 dimensions, one layer of 128 units; 93,409 parameters with 65 characters.

Output t depends on characters 0..t alone, so one pass over a window trains every position in it.
"""

from torch import Tensor, nn

from freshet.models.base import BuiltInModel, check_flag, check_rate, check_whole


class CharLSTM(BuiltInModel):
    """h = the state of the last layer at every character, shape (batch, length, units).

    With ``last_only`` it is the state after the last character, shape (batch, units): one prediction per sample, as in
    LEAF (task ``classification``).
    """

    def __init__(
        self,
        classes: int,
        vocabulary: int,
        *,
        head: bool = False,
        embedding_dim: int = 32,
        units: int = 128,
        layers: int = 1,
        dropout: float = 0.0,
        last_only: bool = False,
    ) -> None:
        super().__init__()
        self.last_only = check_flag("model.last_only", last_only)
        check_whole("model.vocabulary", vocabulary)
        sizes = check_whole("model.embedding_dim", embedding_dim), check_whole("model.units", units)
        self.embedding = nn.Embedding(vocabulary, embedding_dim)
        self.lstm = nn.LSTM(*sizes, num_layers=check_whole("model.layers", layers), batch_first=True)
        self.add_classifier(units, classes, head=head, dropout=check_rate("model.dropout", dropout))

    def encode(self, x: Tensor) -> Tensor:
        states: Tensor = self.lstm(self.embedding(x))[0]
        return states[:, -1] if self.last_only else states
