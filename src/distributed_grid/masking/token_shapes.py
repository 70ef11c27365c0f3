"""Token shapes: secrets that are known by their own form, wherever they are in a text."""

from __future__ import annotations

import re
from typing import Final

from distributed_grid.masking.secret_names import MASK

MIN_TOKEN_CHARS: Final = 15
"""No token of a known kind is shorter."""
# The caller does not choose the words of a process: no pattern takes more than linear time, repetitions are bounded.
_W = r"[A-Za-z0-9_-]"
_SHAPES: Final = (
    r"A(?:KIA|SIA|GPA|IDA|ROA|BIA|CCA)[A-Z0-9]{16}",  # AWS
    rf"gh[pousr]_[A-Za-z0-9]{{16,}}|github_pat_{_W}{{16,}}",  # GitHub
    rf"gl(?:pat|dt|rt|cbt|ptt|ft|soat|agent|imt)-{_W}{{12,}}",  # GitLab
    rf"xox[abdeoprs]-{_W}{{10,}}|xapp-{_W}{{10,}}|xoxe\.xox[bp]-{_W}{{10,}}",  # Slack
    rf"sk-(?={_W}{{0,100}}[0-9]){_W}{{16,}}",  # OpenAI, Anthropic
    rf"[rs]k_(?:live|test|prod)_{_W}{{10,}}|whsec_{_W}{{16,}}",  # Stripe
    rf"hf_[A-Za-z0-9]{{16,}}|gsk_{_W}{{20,}}|r8_{_W}{{20,}}|nvapi-{_W}{{20,}}|pplx-{_W}{{20,}}|xai-{_W}{{20,}}",
    rf"AIza{_W}{{30,}}|ya29\.[A-Za-z0-9_.-]{{10,}}|GOCSPX-{_W}{{10,}}|1//0{_W}{{20,}}",  # Google
    rf"npm_[A-Za-z0-9]{{16,}}|pypi-(?={_W}{{0,100}}[0-9]){_W}{{16,}}|rubygems_[0-9a-f]{{20,}}",  # package registries
    rf"dckr_(?:pat|oat)_{_W}{{12,}}|do[opr]_v1_{_W}{{16,}}|tskey-{_W}{{12,}}|dapi[0-9a-f]{{32}}|pul-[0-9a-f]{{40}}",
    rf"SG\.{_W}{{10,}}\.{_W}{{10,}}|key-[0-9a-f]{{32}}|SK[0-9a-f]{{32}}|NRAK-[A-Z0-9]{{20,}}",
    rf"shp(?:at|ss|ca|pa)_[0-9a-fA-F]{{20,}}|sq0(?:atp|csp)-{_W}{{16,}}|lin_api_{_W}{{16,}}|figd_{_W}{{16,}}",
    rf"dp\.(?:pt|st|ct|sa)\.{_W}{{16,}}|{_W}{{14}}\.atlasv1\.{_W}{{20,}}|glsa_{_W}{{16,}}|glc_{_W}{{20,}}",
    rf"sntrys_{_W}{{16,}}|ATATT3{_W}{{16,}}|CFPAT-{_W}{{16,}}",
    rf"hv[sbr]\.{_W}{{12,}}|s\.(?=[A-Za-z]*[0-9])[A-Za-z0-9]{{24}}(?![A-Za-z0-9.])",  # Vault
    r"AGE-SECRET-KEY-[A-Z0-9]{10,}",
    rf"eyJ{_W}{{8,1500}}+\.[A-Za-z0-9_.-]{{8,}}",  # JSON web tokens, signature included
    rf"[0-9]{{8,10}}:AA{_W}{{30,}}",  # Telegram bots
)
_KNOWN = re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(_SHAPES)})")
_PEM = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----"
    r".*?(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY[A-Z ]{0,10}-----|\Z)",
    re.DOTALL,
)
_WEBHOOK = re.compile(
    r"(?P<kept>hooks\.slack\.com/(?:services|workflows)/|(?:discord|discordapp)\.com/api/webhooks/|webhook\.office\.com/)"
    r"[^\s'\"]+"
)


def mask_tokens(text: str) -> str:
    """A text without known tokens, private keys and webhook addresses."""
    if "-----BEGIN " in text:
        text = _PEM.sub(MASK, text)
    if "hook" in text:
        text = _WEBHOOK.sub(rf"\g<kept>{MASK}", text)
    if len(text) >= MIN_TOKEN_CHARS:
        text = _KNOWN.sub(MASK, text)
    return text
