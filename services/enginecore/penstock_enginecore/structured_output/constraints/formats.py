"""The ``format`` keyword: a regular expression for each format that is honoured. Some are narrower than their standard
(no 29 February, no leap second), none is wider.
"""

_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    f"{_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_AMOUNT = "[0-9]{1,9}"
_CLOCK = f"T({_AMOUNT}H({_AMOUNT}M({_AMOUNT}S)?)?|{_AMOUNT}M({_AMOUNT}S)?|{_AMOUNT}S)"
_DAYS = f"({_AMOUNT}Y({_AMOUNT}M({_AMOUNT}D)?)?|{_AMOUNT}M({_AMOUNT}D)?|{_AMOUNT}D)"

FORMATS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": f"^P({_DAYS}({_CLOCK})?|{_CLOCK}|{_AMOUNT}W)$",
    "email": rf"^[A-Za-z0-9_+-]{{1,32}}(\.[A-Za-z0-9_+-]{{1,32}}){{0,3}}@{_LABEL}(\.{_LABEL}){{1,3}}$",
    "hostname": f"^{_HOST}$",
    "ipv4": rf"^{_OCTET}(\.{_OCTET}){{3}}$",
    "ipv6": "^([0-9A-Fa-f]{1,4}:){7}[0-9A-Fa-f]{1,4}$",
    "uuid": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$",
    "uri": rf"^(https?|ftp)://{_HOST}(:[1-9][0-9]{{0,3}})?(/[A-Za-z0-9._~-]{{0,64}}){{0,16}}"
    r"(\?[A-Za-z0-9._~&=-]{0,256})?(#[A-Za-z0-9._~-]{0,64})?$",
}
