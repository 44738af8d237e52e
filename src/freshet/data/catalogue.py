"""The known data sets: sizes, statistics, formats, official addresses and checksums.

A new data set needs an entry here and a reader for its format. A reader is a function
``read(paths, options) -> {"x_train", "y_train", "x_test", "y_test"}``. The result may also hold ``class_names`` and,
for a natural partition, the client of each sample (``groups_train``, ``groups_test``).
A format names its reader as ``module:function``, so that only the reader in use is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from freshet.data.download import Remote


@dataclass(frozen=True)
class ReadOptions:
    """What a reader must know besides the files."""

    classes: int
    vocabulary: int = 0  # text only: number of token ids
    length: int = 0  # text and characters only: tokens per sample


@dataclass(frozen=True)
class Format:
    """One way to store a data set."""

    title: str
    needs: tuple[str, ...]  # files or folders that must all exist, relative to the data set's folder
    reader: str  # module:function
    slow: bool = False  # cache the decoded arrays
    checksums: dict[str, str] = field(default_factory=dict)  # published checksums of the files in needs


@dataclass(frozen=True)
class Spec:
    """One data set. It comes with the installation if its format needs no files."""

    name: str
    title: str
    kind: str  # "images", "text" (words of a vocabulary, padded) or "characters" (windows of a text, all classes)
    classes: int
    counts: tuple[tuple[int, int], ...]  # published numbers of (training, test) samples, the full set first
    formats: tuple[Format, ...]
    model: str  # default network
    shape: tuple[int, ...] = ()  # of one image; a text has the shape (length,)
    dtype: str = "uint8"
    folders: tuple[str, ...] = ()  # usual names of its folder inside a data folder
    remotes: tuple[Remote, ...] = ()
    class_names: tuple[str, ...] = ()
    balanced: bool = True  # every class has equally many samples
    mean: tuple[float, ...] | None = None  # per channel, in units of 0..1
    std: tuple[float, ...] | None = None
    digest: str = ""  # SHA-256 of the decoded samples and labels with the default options, see sources.digest
    note: str = ""  # for the documentation
    clients: int = 0  # natural clients; the default partition is then natural, one device per client
    task: str = "classification"
    length: int = 256  # tokens per sample, unless data.length is given
    options: dict[str, Any] = field(default_factory=dict)  # of the default network, where it is not named

    @property
    def built_in(self) -> bool:
        """Whether the data set needs no files."""
        return not any(form.needs for form in self.formats)

    def token_ids(self, vocabulary: int) -> int | None:
        """Number of token ids of a sample: as asked for words, one per class for characters, None for images."""
        return {"text": vocabulary, "characters": self.classes}.get(self.kind)

    def defaults(self) -> dict[str, dict[str, Any]]:
        """Settings that this data set suggests, where they differ from the usual ones."""
        found: dict[str, dict[str, Any]] = {}
        if self.task != "classification":
            found["training"] = {"task": self.task}
        if self.length != 256:
            found["data"] = {"length": self.length}
        if self.clients:
            found.setdefault("data", {})["partition"] = "natural"
        return found


_GITHUB_FASHION = "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/"
_S3_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_FASHION_MD5 = {
    "train-images-idx3-ubyte.gz": "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "md5:25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "md5:bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "md5:bb300cfdad3c16e7a12a480ee83cd310",
}
_CIFAR_MD5 = {
    "cifar-10-binary.tar.gz": "md5:c32a1d4ab5d03f1284b67883e8d87530",
    "cifar-10-python.tar.gz": "md5:c58f30108f718f92721af3b95e74349a",
    "cifar-100-binary.tar.gz": "md5:03b5dce01913d631647c71ecec9e9cb8",
    "cifar-100-python.tar.gz": "md5:eb9058c3a382ffc7106e4002c42a8d85",
}
_IMDB_MD5 = {"aclImdb_v1.tar.gz": "md5:7c2ac02c03563afcf9b574c7e56c153a"}
_SHAKESPEARE_SHA256 = "sha256:86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
_TINY_MD5 = {"tiny-imagenet-200.zip": "md5:90528d7ca1a48142e341f4ef8d21d0de"}


def _cifar_formats(classes: int) -> tuple[Format, ...]:
    binary_folder = "cifar-10-batches-bin" if classes == 10 else "cifar-100-binary"
    python_folder = "cifar-10-batches-py" if classes == 10 else "cifar-100-python"
    binary, python = f"cifar-{classes}-binary.tar.gz", f"cifar-{classes}-python.tar.gz"
    strips = (*(f"train_{i}.zip" for i in range(1, 6)), "test.zip")
    return (
        Format("official binary folder", (binary_folder,), "freshet.data.cifar:read_binary"),
        Format("official binary archive", (binary,), "freshet.data.cifar:read_binary", checksums=_CIFAR_MD5),
        Format("official python folder", (python_folder,), "freshet.data.cifar:read_python"),
        Format("official python archive", (python,), "freshet.data.cifar:read_python", checksums=_CIFAR_MD5),
        Format("compact WebP strips", strips, "freshet.data.cifar:read_strips", slow=True),
    )


def _cifar_remote(classes: int) -> tuple[Remote, ...]:
    file = f"cifar-{classes}-binary.tar.gz"
    return (Remote(file, _CIFAR_MD5[file], (_TORONTO + file,)),)


_CIFAR100_NAMES = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle "
    "caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant "
    "flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man "
    "maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree "
    "plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper "
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train "
    "trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)

_SPECS = (
    Spec(
        name="digits",
        title="Handwritten digits (scikit-learn)",
        kind="images",
        classes=10,
        counts=((1438, 359),),
        formats=(Format("built in", (), "freshet.data.sources:read_digits"),),
        model="digits",
        shape=(1, 8, 8),
        dtype="float32",
        class_names=tuple("0123456789"),
        balanced=False,
        digest="7b51ba9042d5d15dca3b6e9836299c7f016f7c209340f3869efb1c955109520c",
        note="values in 0..1; comes with scikit-learn",
    ),
    Spec(
        name="digits-moved",
        title="Handwritten digits, 27 versions of each training image",
        kind="images",
        classes=10,
        counts=((38_826, 359),),
        formats=(Format("built in", (), "freshet.data.sources:read_moved_digits"),),
        model="digits",
        shape=(1, 8, 8),
        dtype="float32",
        class_names=tuple("0123456789"),
        balanced=False,
        digest="15162808ffa055f8f69a67a7a6d4a09b59bb0c4159ffec7768d5fc85bcd50b4e",
        note="for fleets of thousands of devices; moved by up to one pixel, three contrasts; the digits' own test set",
    ),
    Spec(
        name="fashion-mnist",
        title="Fashion-MNIST",
        kind="images",
        classes=10,
        counts=((60_000, 10_000),),
        folders=("fashion-mnist", "fashion_mnist", "FashionMNIST/raw", "FashionMNIST"),
        formats=(Format("official IDX files", tuple(_FASHION_MD5), "freshet.data.idx:read_splits"),),
        model="lenet5",
        shape=(1, 28, 28),
        remotes=tuple(Remote(f, md5, (_GITHUB_FASHION + f, _S3_FASHION + f)) for f, md5 in _FASHION_MD5.items()),
        class_names=(
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
        mean=(0.28604,),
        std=(0.35302,),
        digest="ece172613115fb18b120bec8f6c02271af90b8b8f0a5af5c51cbd5ceed68e619",
    ),
    Spec(
        name="cifar10",
        title="CIFAR-10",
        kind="images",
        classes=10,
        counts=((50_000, 10_000),),
        folders=("cifar10", "cifar-10"),
        formats=_cifar_formats(10),
        model="lenet5",
        shape=(3, 32, 32),
        remotes=_cifar_remote(10),
        class_names=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        mean=(0.49140, 0.48216, 0.44653),
        std=(0.24703, 0.24349, 0.26159),
        digest="9048fcbac9c08a64d57a7c5a5a66750a974ad4eab380914df129f7e223d823df",
    ),
    Spec(
        name="cifar100",
        title="CIFAR-100",
        kind="images",
        classes=100,
        counts=((50_000, 10_000),),
        folders=("cifar100", "cifar-100"),
        formats=_cifar_formats(100),
        model="lenet5",
        shape=(3, 32, 32),
        remotes=_cifar_remote(100),
        class_names=tuple(_CIFAR100_NAMES.split()),
        mean=(0.507075, 0.486549, 0.440918),
        std=(0.267334, 0.256438, 0.276150),
        digest="283e80e15e3841cce98044da5929d8557a88969bfd2d77d1c1db7bb78ba419f7",
    ),
    Spec(
        name="imdb",
        title="IMDb movie reviews",
        kind="text",
        classes=2,
        counts=((25_000, 25_000),),
        folders=("imdb", "IMDb"),
        formats=(
            Format("official folder", ("aclImdb",), "freshet.data.imdb:read_official", slow=True),
            Format(
                "official archive", tuple(_IMDB_MD5), "freshet.data.imdb:read_official", slow=True, checksums=_IMDB_MD5
            ),
            Format(
                "compact text",
                ("imdb_reviews.txt.xz", "ratings.npy"),
                "freshet.data.imdb:read_compact",
                slow=True,
                checksums={
                    "imdb_reviews.txt.xz": "sha256:05b06023c23fa4253accecc2af752b16851177c2f10f2ffd1223547187916efd",
                    "ratings.npy": "sha256:538684079561133243c5664a74556326470f2bcdc6ceaae09dd40582390d5394",
                },
            ),
        ),
        model="textcnn",
        dtype="int32",
        remotes=tuple(
            Remote(f, md5, ("https://ai.stanford.edu/~amaas/data/sentiment/" + f,)) for f, md5 in _IMDB_MD5.items()
        ),
        class_names=("negative", "positive"),
        digest="be5c28b6521577e1be02bf0fc9d995bf7c7997c8ce68cff5fe9fb4df14cdbb89",
    ),
    Spec(
        name="tiny-imagenet",
        title="Tiny-ImageNet-200",
        kind="images",
        classes=200,
        counts=((100_000, 10_000), (20_000, 4_000)),  # the second is the compact subset: 100 and 20 per class
        folders=("tiny_imagenet", "tiny-imagenet"),
        formats=(
            Format("official folder", ("tiny-imagenet-200",), "freshet.data.tiny_imagenet:read_official", slow=True),
            Format(
                "official archive",
                tuple(_TINY_MD5),
                "freshet.data.tiny_imagenet:read_official",
                slow=True,
                checksums=_TINY_MD5,
            ),
            Format(
                "compact subset (100 + 20 per class)",
                ("train.npz", "val.npz", "classes.txt"),
                "freshet.data.tiny_imagenet:read_compact",
                slow=True,
                checksums={
                    "train.npz": "sha256:ff3e8fd1fd962540bafdff58b825d138f6c6ccd97909d3f651c81715f9247d80",
                    "val.npz": "sha256:d6d4f3a1796013127c24237753f39b95ab2704cfea5747dda565d2c45186128c",
                    "classes.txt": "sha256:e3af51ed2f535d47af0f393f4a152939fbfcbdf39f8e2c358524ce6c2a480fc6",
                },
            ),
        ),
        model="resnet20",
        shape=(3, 64, 64),
        remotes=tuple(Remote(f, md5, ("http://cs231n.stanford.edu/" + f,)) for f, md5 in _TINY_MD5.items()),
        mean=(0.4802, 0.4481, 0.3975),
        std=(0.2770, 0.2691, 0.2821),
        note="the official validation images are the test set",
    ),
    Spec(
        name="shakespeare",
        title="Tiny Shakespeare, by speaker",
        kind="characters",
        classes=65,
        counts=((9_123, 2_248),),  # windows of 80 characters
        folders=("shakespeare", "tinyshakespeare", "tiny-shakespeare"),
        formats=(
            Format(
                "official text",
                ("input.txt",),
                "freshet.data.shakespeare:read_text",
                checksums={"input.txt": _SHAKESPEARE_SHA256},
            ),
            Format(
                "compressed text",
                ("tinyshakespeare.txt.xz",),
                "freshet.data.shakespeare:read_text",
                checksums={
                    "tinyshakespeare.txt.xz": "sha256:21b40ccf4999c004256d116655824719001352dbc22636354d9cd0c645d03a4a"
                },
            ),
        ),
        model="charlstm",
        dtype="int32",
        remotes=(
            Remote(
                "input.txt",
                _SHAKESPEARE_SHA256,
                ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
            ),
        ),
        balanced=False,
        clients=99,
        task="tokens",
        length=80,
        digest="2a40709be980eaa459791e204b5eb7a84827190cab27ccd0953ea322b4a7c950",
        note="next character, clients are the 99 speakers with 2,000 characters or more",
    ),
)

CATALOGUE: dict[str, Spec] = {spec.name: spec for spec in _SPECS}
