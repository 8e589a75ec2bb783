"""The zoo: shapes, the conventions of its sources, and the weights that come with it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

import netmoments as nm
from netmoments.data.images import correct, duplicates_of
from netmoments.network.weights import read_tensors
from netmoments.network.zoo import SHIPPED, ZOO, AlexNet


@pytest.mark.parametrize("name", ["digits", "lenet", "faces", "squeezenet"])
def test_every_network_takes_its_input_and_gives_scores(name):
    network = nm.zoo.build(name)
    assert not network.training
    with torch.no_grad():
        assert network(torch.rand(2, *ZOO[name].input_shape)).dim() == 2


def test_relus_are_where_the_paper_counts_them():
    relus = nm.relus(nm.zoo.build("lenet"), torch.rand(1, 1, 28, 28))
    assert [relu.size for relu in relus] == [32 * 14 * 14, 64 * 7 * 7, 1024]
    assert len(nm.relus(nm.zoo.build("faces"), torch.rand(1, 1, 48, 48))) == 7


@pytest.mark.parametrize(("name", "relus"), [("digits", 3), ("lenet", 3), ("faces", 7)])
def test_networks_of_the_zoo_come_trained(name, relus):
    net = nm.load_network(name)
    example = torch.zeros(1, *nm.zoo.entry(name).input_shape)
    assert len(nm.relus(net, example)) == relus
    fresh = nm.zoo.build(name)
    assert not fresh.training
    assert fresh(example).shape == net(example).shape


def test_the_fire_modules_of_squeezenet():
    net = nm.zoo.build("squeezenet")
    found = nm.relus(net, torch.zeros(1, 3, 227, 227))
    assert len(found) == 18
    assert [found[0].name, found[2].name, found[-1].name] == ["1.relu1", "1.fire2.expand_relu", "1.relu10"]
    assert found[2].shape == (128, 55, 55)


def test_alexnet_has_torchvisions_names_and_shapes():
    with torch.device("meta"):
        state = {name: tuple(x.shape) for name, x in AlexNet().state_dict().items()}
    assert state == {
        "features.0.weight": (64, 3, 11, 11), "features.0.bias": (64,),
        "features.3.weight": (192, 64, 5, 5), "features.3.bias": (192,),
        "features.6.weight": (384, 192, 3, 3), "features.6.bias": (384,),
        "features.8.weight": (256, 384, 3, 3), "features.8.bias": (256,),
        "features.10.weight": (256, 256, 3, 3), "features.10.bias": (256,),
        "classifier.1.weight": (4096, 9216), "classifier.1.bias": (4096,),
        "classifier.4.weight": (4096, 4096), "classifier.4.bias": (4096,),
        "classifier.6.weight": (1000, 4096), "classifier.6.bias": (1000,),
    }  # fmt: skip


def test_preparations_are_affine_and_as_documented():
    image = torch.tensor([0.2, 0.4, 0.6]).reshape(1, 3, 1, 1)
    caffe = nm.zoo.CaffeInput()(image).flatten()
    torch.testing.assert_close(caffe, torch.tensor([0.6 * 255 - 104, 0.4 * 255 - 117, 0.2 * 255 - 123]))
    imagenet = nm.zoo.ImageNetInput()(image).flatten()
    expected = [(0.2 - 0.485) / 0.229, (0.4 - 0.456) / 0.224, (0.6 - 0.406) / 0.225]
    torch.testing.assert_close(imagenet, torch.tensor(expected))


def test_squeezenet_recognizes_natural_images(data_dir):
    weights = data_dir / "squeezenet" / "squeezenet_v1.0_deepcompressed.npz"
    natural = data_dir / "natural" / "natural31_256.npz"
    if not (weights.exists() and natural.exists()):
        pytest.skip("no SqueezeNet or natural images")
    words = (data_dir / "squeezenet" / "imagenet_synset_words.txt").read_text().splitlines()
    network = nm.zoo.pretrained("squeezenet", weights)
    images = nm.data.load(natural, size=227)
    with torch.no_grad():
        answers = [words[int(k)] for k in network(images.images[:4]).argmax(1)]
    assert [answer.split(" ", 1)[1].split(",")[0] for answer in answers] == [
        "barn",
        "wardrobe",
        "bathing cap",
        "bonnet",
    ]


def test_shipped_weights_are_half_precision_small_and_say_how_they_were_made():
    files = sorted(SHIPPED.glob("*.safetensors"))
    assert [file.stem for file in files] == ["digits", "faces", "lenet"]
    assert sum(file.stat().st_size for file in files) < 20e6
    for file in files:
        tensors, facts = read_tensors(file)
        assert {x.dtype for x in tensors.values()} <= {torch.float16, torch.int64}
        assert {"network", "data", "seed", "torch", "device"} <= facts.keys()


def test_digits_network_is_as_accurate_as_the_readme_says():
    assert float(correct(nm.zoo.pretrained("digits"), nm.data.load("digits")).double().mean()) >= 0.97


@pytest.mark.slow
def test_lenet_is_as_accurate_as_the_readme_says(mnist):
    assert float(correct(nm.zoo.pretrained("lenet"), nm.data.load(mnist)).double().mean()) >= 0.99


def test_lenet_knows_most_of_the_first_images(mnist):
    """99 % of all 10,000, within five standard errors of the first 1,000."""
    right = correct(nm.zoo.pretrained("lenet"), nm.data.load(mnist).first(1000))
    assert float(right.double().mean()) >= 0.99 - 5 * (0.99 * 0.01 / 1000) ** 0.5


@pytest.mark.slow
def test_face_network_is_as_accurate_as_the_readme_says(fer2013_npz):
    test = nm.data.load(fer2013_npz, split="private-test")
    right = correct(nm.zoo.pretrained("faces"), test)
    known = duplicates_of(test.images, nm.data.load(fer2013_npz, split="train").images)
    assert float(right.double().mean()) >= 0.64
    assert int(known.sum()) == 288
    assert float(right[~known].double().mean()) >= 0.64


def test_unknown_names():
    with pytest.raises(ValueError, match="no network 'resnet' in the zoo; there are digits, lenet, faces"):
        nm.zoo.build("resnet")
    with pytest.raises(ValueError, match="no weights come with 'alexnet'"):
        nm.zoo.pretrained("alexnet")


@pytest.mark.slow
def test_alexnet_takes_a_state_dict_with_torchvisions_names(tmp_path):
    torch.manual_seed(0)
    state = {name: x.half() for name, x in AlexNet().state_dict().items()}
    save_file(state, tmp_path / "alexnet.safetensors")
    network = nm.zoo.pretrained("alexnet", tmp_path / "alexnet.safetensors")
    assert torch.equal(network[1].classifier[6].bias.half(), state["classifier.6.bias"])
    relus = nm.relus(network, torch.rand(1, 3, 224, 224))
    assert len(relus) == 7
    assert relus[-1].size == 4096
