"""Dates are moved, and keep the form in which they are written."""

from datetime import timedelta

import pytest

from sfumato.data.dates import PART_ORDERS, move_date, orders_in


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        ("1996-08-27T10:11:12", "1996-07-27T10:11:12"),
        ("20081996", "20071996"),
        ("1.2.1990", "1.1.1990"),
        ("1.2.00", "1.1.00"),
        ("5/13/1990", "4/12/1990"),
        ("96-08-27", "96-07-27"),
        ("Aug 5, 1990", "Jul 5, 1990"),
        ("August 5, 1990", "July 5, 1990"),
        ("27-AUG-96", "27-JUL-96"),
        ("27. März 1991", "24. Februar 1991"),
        ("5 mai 2001", "4 apr 2001"),
        ("5. Okt. 2001", "4. Sep. 2001"),
        ("5 Sept 2001", "5 Aug 2001"),
        ("1996年8月27日", "1996年7月27日"),
        ("30.02.1990", "30.01.1990"),
    ],
)
def test_a_date_keeps_its_form(text, moved):
    assert move_date(text, timedelta(days=31), PART_ORDERS) == moved


def test_the_month_is_first_if_a_day_above_twelve_is_second():
    orders = orders_in(["03/04/1990", "03/14/1990"])
    assert move_date("03/04/1990", timedelta(days=1), orders) == "03/03/1990"
    assert move_date("03/04/1990", timedelta(days=1), orders_in(["03/04/1990"])) == "02/04/1990"
