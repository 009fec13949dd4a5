"""GGUF blocks whose codes are rows of a book: eight or four magnitudes at once, and their signs.

Knows how each block is laid out, in the words of `gguf`; nothing of files.
"""

from __future__ import annotations

import base64
import functools
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from trireme.quant.blocks import cut, half, scale, spread_bits


@dataclass(frozen=True)
class Book:
    """Rows of `width` digits, lowest first, each standing for a magnitude. As numbers the rows rise, and are multiples of `unit`:
    `steps` are from each to the next, divided by it, the first from 0, a byte each, compressed by zlib and written in base 85."""

    width: int
    unit: int
    magnitudes: tuple[int, ...]
    steps: str

    def rows(self) -> Tensor:
        """[entries, width] int8"""
        steps = torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(self.steps))), dtype=torch.uint8)
        numbers, base = steps.long().cumsum(0) * self.unit, len(self.magnitudes)
        digits = numbers[:, None] // base ** torch.arange(self.width) % base
        return torch.tensor(self.magnitudes, dtype=torch.int8)[digits]


BOOKS: dict[str, Book] = {
    "IQ2_XXS": Book(
        8,
        2,
        (8, 25, 43),
        "c-kdTL2|+{46H0mLAGNjCLu{D&2)eaFy+7xdf>zt`h|Xjha<N-tTel;S?LY_3c(aaqZ6_PG*w~-"
        "$u%Gql@+=4$^iwCB*n|c??agBpgt?Cd&pvGq)A0~ebZKZK#8^44?94=u`t;Y&dOC?bhp6c_xpb^TB9K%(VAd`rG%U}o|cP}X6g;ijfNs*4E1n0Ls"
        "+*xVY4hJl#sePW%C8Y{TI;1$ozRMUr26R?__(qu6qCAyN}7y^=J2JeOhnN@dZ4s41x",
    ),
    "IQ2_XS": Book(
        8,
        2,
        (8, 25, 43),
        "c-mc%(N4oK3`KElC$Uq~W-"
        "aZuifKXuUO+<PfnVVNzX+#er7ThsE4Hss?j3BFTW?%W2mF`3JR#baOUQsOklr+b<81{~1`G~z^DE=fM7)rNl2HXm$2StVBv%RX5G)qiU7s9yG+CK"
        "_+FMWbn%wmCa3!rhQV)!smd08l%$YkMPd1&ChDYD{-"
        "obzNE8S+Yi)5()^XiAuL_m)tQ^Kj15EWLN^tv%9S8L$d9x4q93*jDzE|HH^GQ(F>g~%&>hBk&5apT+Za4uA~2Bd{e7<>DA#Dy|Q)OON7V@wQ*J_-"
        "`oks&skpH<yG;<<<Medtf!t}@d!VKI8mvKzit&A&b33={P62PTUQ(E",
    ),
    "IQ2_S": Book(
        8,
        2,
        (8, 25, 43),
        "c-"
        "nnaL2`pI46G&DmVwYvl4b(aL$AGd^8c?@!r0h^l$j9OQdYYw<;@fiJbfd;mc*2Tc);}rDHeDDAlhN12a6x(64+s*U4deZA$Kfk0Qraq6bmU>BcUD"
        "K)*Na*P`9o{E^k&oB1t}6c78#!zQB+vpOQ98$u3uMYccpssY)OS38Er(5+e*brPCQM9p5+e(94O($oV9s@vC*cGtGg}I0b}qk|ujn;_EfSM*gK|&"
        "sL~_un}!Bxwz(Cne|>?^YP-XGx^79HvLh0i+VL^&S$b}*38!?uSXPFabhpL&IAQWAolz%245O?`uU`F9)M{Haao><x3JUcN^nag>4+mWS~|x8j%2"
        "!aYK;pN@vxM=l+Y;Q9d;gGfzCXr+{p~^2>M6VbsDj62b4{E2VEo#gGc_I_<n18V-0*Xf9vE7(E",
    ),
    "IQ3_XXS": Book(
        4,
        1,
        (4, 12, 20, 28, 36, 44, 52, 62),
        "c-"
        "kF}K~ID*6ol>Y=mSb06<WIncY$3=(2yAM>`lE9|Np<Sc$j2nGWq5X$UzERK7x{E%D|>BQq5pcrG>PDxph7_HAr{vBYHv*cdV0O)CtUZJ2GE2q_ob"
        "^ZK1ZScNzajl$8UJ(A<+MzzJ!U^-"
        "L>Ga`ILG4HKV^$6)gVVbCMD!8Pq?(`jAzLmQUhji9F8H_GYz%P^Zs!k$647z^#<AY<`zPTxiRU1f8S^LUw`_0KfFFR}rub!+w7=MPrG<OZ}~fB7v"
        "BnE",
    ),
    "IQ3_S": Book(
        4,
        1,
        (1, 3, 5, 7, 9, 11, 13, 15),
        "c-keA+fKtk3`E)SE%DwGn$m`XR8*u2-"
        "Vy)*XL!rgt}T1!*nUchkWvDWSOpXxff0=yCnjRBRTfQ*L=h6}D5^9m6AYw`3Z~5QRnqP#h<ZksOlWI2JTjHHhvu*f2Q<*EDI8gh)X)@8gF?y42SV"
        "s2mQ`~gRalT5AC>*iRB;)gg;$;aB{8HzdAv2IA}9_1=r|KO#Ng~P5Ai%&wPl^jh<7rXYsz(k_#1Crk>%Bfpp9)1TqnQ+VsVZjCftoB+-"
        "9)0Nri1yt`>dn^>DZbZob7N;cvFMM7K(W8${TplNK2ae8Y22dx3xK>voo$b=Q!Lz7p36=J~3#i`J8*UZuoxikHuF!0#39cWm~!EcX8LtXXs_(tlc"
        "Sv~S1D7k-%LC@8vE?syxQvvogHdx=w@znAOj{s-R}55W",
    ),
    "IQ1_S": Book(
        8,
        1,
        (-1, 0, 1),
        "c-"
        "n1M*Mi$H3@e8yd1Umx|Nor@NGW!%)#YqagA<^CDTg(6ZJ|1H!iNh)l@?Bc)Bd&JA{v(QGvn*PW<<El3ojKJSWt+9xz^Z>Pl!)HmFi7gaoCSbtKUt"
        "iH;EyJ$%*4}w{CD6BgI|vq^7fCINL0yQ7i?#;D9g&48Ivj%cvY)({reVqvp-hTRgCfRV(+g!-"
        "Y>In6=a>b5UwCqs{o!p4T?CiYYhYw+=sjL^)UcNW%W4Xgy7*9`|9TW9wb}42KzW+ba`HK&9dm5pNfd@{)0)QlAq0T|$XsRH&HXqS?vfRTi<jGyWX"
        "71VgwhEW+4tHQKWR%%s6ICy^I$L)KOrZucsmUW(st07<4I6Q<K~KyQ{0YUIcwL6iH|_Bd^eRfTzo$HHV~)aRRd%+zD&lUZs;&aSJLl_Z?$Oxgkzd"
        "YjOX3<%o!m&dZMg@!~YtHog6tUb1$dlZI}B3^bw3BJVq#LM(bKVm7(o3Y|>>L-"
        "`x#@3QJn?%L7NG0_@pXmsf5&Lph?vP#9<TG@cw<Xv*sT02Iw3*yT5hQ2kyhL_n<h_-5rKcpn>J;&B=!TIiF|4~d6ITYaR=u1$6TIP*lJ-"
        "bKA#HFJgn)%eI+Mh}+93|4+XKjZk?86dlT#nM%<@ycdXqjEf;4S*%q=e?z6O9#>QsWj-NkoPdm*%>0w{xy7L$)AGI8!k9c)%Ej|mj9-"
        "mRKg5lntGy~3iGN#ruv1Fr*UqnGeN%j_hvquWNpsNzlrT%AnEvzjnmV_mF8Psmk=B)TIzeEC4LBUWqGegEO$<3@6nFp|(imhX#kd^agTkL1jZEyn"
        "Z;)zza?I(*F9;D-&~iiw~CjOhPxq`ody4+At?f{92D#NsRnfwZ%!dcs&X`aCXlEQhOoSTP(uaN9<GUQUAe@l~bkgO>D^mljRYD-"
        "D&w$JBo|#ovfNY<(=^&&<MX1hLq!Z-!w*lOzUgyCm`^XpS%I11&uUn}{CmaUJ=1`xnWK8KD",
    ),
}


@functools.cache
def _book(kind: str, device: torch.device) -> Tensor:
    """A book on a device, a row of it as one whole number, so that a look-up moves whole rows."""
    rows = BOOKS[kind].rows()
    return rows.view(torch.int64 if rows.shape[1] == 8 else torch.int32).flatten().to(device)


@functools.cache
def _signs(device: torch.device) -> Tensor:
    """What seven bits say of eight signs, 1 or -1: the eighth is minus where that makes the number of minuses even."""
    minus = torch.arange(128)[:, None] >> torch.arange(7) & 1
    minus = torch.cat([minus, minus.sum(1, keepdim=True) % 2], 1)
    return (1 - 2 * minus).to(torch.int8).view(torch.int64).flatten().to(device)


def _look_up(kind: str, index: Tensor) -> Tensor:
    """The rows of a book, side by side.  index: [blocks, n]; result: [blocks, n * width] int8"""
    found = _book(kind, index.device).index_select(0, index.flatten().int())
    return found.view(torch.int8).view(len(index), -1)


def _flipped(codes: Tensor, seven: Tensor) -> Tensor:
    """codes, each eight with the signs that seven bits tell.  seven: [blocks, n]"""
    return codes.mul_(_signs(codes.device).index_select(0, seven.flatten().int()).view(torch.int8).view(codes.shape))


def _minus(codes: Tensor, bits: Tensor) -> Tensor:
    """codes, negated where a bit is set, low bits first.  bits: [blocks, n] uint8"""
    return codes.mul_(1 - 2 * spread_bits(bits).view(torch.int8))


def _low_high(packed: Tensor) -> Tensor:
    """Both nibbles of each byte, the low one first, in their order."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)


def _shifted(packed: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Some fields of each number, one after the other, as int32."""
    places = torch.tensor(shifts, dtype=torch.int32, device=packed.device)
    return (packed.int().unsqueeze(-1) >> places & mask).flatten(1)


def iq2_xxs(blocks: Tensor, out: Tensor) -> None:
    """d f16 | 8 runs of 32 values: i 4 bytes, w u32.    y = (d (1/2 + (w >> 28)) / 4) G[i[k]] sign, k the run's group of 8

    Signs of group k: bits 7k to 7k + 6 of w.
    """
    runs = cut(blocks, 2, 66).view(-1, 8)
    words = cut(runs, 4, 8, torch.int32)
    codes = _flipped(_look_up("IQ2_XXS", runs[:, :4]), _shifted(words, (0, 7, 14, 21), 127))
    factors = (words >> 28 & 15).view(-1, 8) + 0.5
    scale(codes.view(len(blocks), -1), (half(blocks, 0) * factors).mul_(0.25), out)


def iq2_xs(blocks: Tensor, out: Tensor) -> None:
    """d f16 | w 32 u16 | s 16 nibbles, low first; runs of 16.    y = (d (1/2 + s[r]) / 4) G[w & 511] sign, the signs w >> 9"""
    words = cut(blocks, 2, 66, torch.int16).int()
    codes = _flipped(_look_up("IQ2_XS", words & 511), words >> 9 & 127)
    scale(codes, (half(blocks, 0) * (_low_high(cut(blocks, 66, 74)) + 0.5)).mul_(0.25), out)


def iq2_s(blocks: Tensor, out: Tensor) -> None:
    """d f16 | i 32 bytes | a bit for each sign | h 8 bytes | s 16 nibbles, low first; runs of 16.

    y = (d (1/2 + s[r]) / 4) G[i | h << 8] sign; h has two bits for each i, low first
    """
    index = cut(blocks, 2, 34).int() | _shifted(cut(blocks, 66, 74), (0, 2, 4, 6), 3) << 8
    codes = _minus(_look_up("IQ2_S", index), cut(blocks, 34, 66))
    scale(codes, (half(blocks, 0) * (_low_high(cut(blocks, 74, 82)) + 0.5)).mul_(0.25), out)


def iq3_xxs(blocks: Tensor, out: Tensor) -> None:
    """d f16 | i 64 bytes | w 8 u32; runs of 32.    y = (d (1/2 + (w >> 28)) / 2) G[i] sign, the signs as in IQ2_XXS"""
    words = cut(blocks, 66, 98, torch.int32)
    codes = _flipped(_look_up("IQ3_XXS", cut(blocks, 2, 66)), _shifted(words, (0, 7, 14, 21), 127))
    scale(codes, (half(blocks, 0) * ((words >> 28 & 15) + 0.5)).mul_(0.5), out)


def iq3_s(blocks: Tensor, out: Tensor) -> None:
    """d f16 | i 64 bytes | h a bit for each i | a bit for each sign | s 8 nibbles, low first; runs of 32.

    y = (d (1 + 2 s[r])) G[i | h << 8] sign
    """
    index = cut(blocks, 2, 66).int() | spread_bits(cut(blocks, 66, 74)).int() << 8
    codes = _minus(_look_up("IQ3_S", index), cut(blocks, 74, 106))
    scale(codes, half(blocks, 0) * (_low_high(cut(blocks, 106, 110)) * 2 + 1), out)


_AWAY = 0.125  # how far the values of one bit and a half are moved


def iq1_s(blocks: Tensor, out: Tensor) -> None:
    """d f16 | i 32 bytes | h 8 u16; runs of 32.    y = (d (2 (h >> 12 & 7) + 1)) (G[i | b << 8] ± 1/8)

    b: three bits of h for each of its four i, low first; minus where the highest bit of h is set.
    """
    words = cut(blocks, 34, 50, torch.int16).int()
    index = cut(blocks, 2, 34).int() | _shifted(words, (0, 3, 6, 9), 7) << 8
    moved = torch.where(words >> 15 & 1 == 0, _AWAY, -_AWAY).repeat_interleave(32, 1)
    scale(_look_up("IQ1_S", index) + moved, half(blocks, 0) * ((words >> 12 & 7) * 2 + 1), out)


def iq1_m(blocks: Tensor, out: Tensor) -> None:
    """i 32 bytes | h 32 nibbles, low first | w 4 u16; runs of 16.    y = (d (2 s[r] + 1)) (G[i | (h & 7) << 8] ± 1/8)

    d: the four highest bits of each w, the first lowest, read as f16; s: three bits each of the rest, low first; minus where the
    highest bit of h is set.
    """
    words, high = cut(blocks, 48, 56, torch.int16).int(), _low_high(cut(blocks, 32, 48)).int()
    bits = (words >> 12 & 15) << torch.arange(0, 16, 4, dtype=torch.int32, device=blocks.device)
    whole = bits.sum(1, keepdim=True).to(torch.int16).view(torch.float16).float()
    index = cut(blocks, 0, 32).int() | (high & 7) << 8
    moved = torch.where(high & 8 == 0, _AWAY, -_AWAY).repeat_interleave(8, 1)
    scale(_look_up("IQ1_S", index) + moved, whole * (_shifted(words, (0, 3, 6, 9), 7) * 2 + 1), out)
