"""docs/settings.md is what trireme/config.py says."""

from settings_page import PAGE, page


def test_the_page_of_settings_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "the settings have changed. Fix: python tools/settings_page.py"
