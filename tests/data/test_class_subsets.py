"""Classes by name."""

from __future__ import annotations

import pytest

from vitinit.data.class_subsets import class_indices, imagenet_wnids
from vitinit.data.datasets import is_wnid
from vitinit.data.images import DataError


def test_imagenets_classes_are_1000_wnids_in_alphabetical_order():
    wnids = imagenet_wnids()
    assert len(set(wnids)) == 1000 and wnids == sorted(wnids) and all(map(is_wnid, wnids))


@pytest.mark.parametrize("index, wnid", [
    (0, "n01440764"),       # tench
    (207, "n02099601"),     # golden retriever
    (281, "n02123045"),     # tabby
    (999, "n15075141"),     # toilet tissue
])
def test_a_class_has_the_number_that_everyone_gives_it(index, wnid):
    assert imagenet_wnids()[index] == wnid


def test_each_class_of_a_set_is_found_at_its_index_in_the_model():
    known = ["ant", "bee", "cat", "dog", "eel"]
    assert class_indices(known, ["dog", "ant", "eel"]) == [3, 0, 4]
    assert class_indices(known, known) == [0, 1, 2, 3, 4]


def test_a_class_that_the_model_does_not_know_is_named():
    with pytest.raises(DataError) as error:
        class_indices(["ant", "bee", "cat"], ["bee", "cow"])
    assert str(error.value) == "class 'cow' is none of the model's 3 classes (ant, bee, … cat)"
