"""paho's client, which holds no more of a message than says anything to us, and does little for each."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import paho.mqtt.client as paho
from paho.mqtt.enums import MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from talaria.wire.frames import MAX_FRAME

LARGEST, PIECE = MAX_FRAME + (1 << 16) + 1280, 1 << 18
"""Bytes of a packet that are held at most, so that no frame on any topic is cut, and those that are read at once."""
AHEAD = 1 << 12
"""Bytes that are read at once where paho asks for fewer."""
_SUCCESS = MQTTErrorCode.MQTT_ERR_SUCCESS
_TAKEN = ReasonCode(PacketTypes.PUBACK)
_NO_PROPERTIES = Properties(PacketTypes.PUBACK)  # type: ignore[no-untyped-call]


class Client(paho.Client):
    """What is beyond the largest packet that says anything to us is read and forgotten, not held: a broker, or whoever
    may publish there, can send 256 MiB at once. What is left of it is no frame, and is acknowledged as any other.

    A message and an acknowledgement are taken apart here: a payload is copied once, where paho copies all that is left
    of a packet four times, and nothing is made of MQTT 5's properties, which nobody reads. paho reads a packet's first
    bytes one by one from the socket; here they come out of what was read ahead."""

    told: Callable[[str, bytes, bool], None] | None = None
    """Is told the topic and payload of each message, and whether it was retained. It must not raise."""
    over = False
    """Whether nobody waits any more for the connection that is being made."""
    _ahead = memoryview(b"")
    _drains = False
    """Whether only what was read ahead is taken."""

    def let_go(self) -> None:
        """Close what wakes the network thread, which has ended: paho leaves that to the garbage collector."""
        self._reset_sockets(sockpair_only=True)

    def loop_read(self, max_packets: int = 1) -> MQTTErrorCode:
        """Read what came, with what was read ahead: no selector tells of that."""
        code = super().loop_read(max_packets)
        self._drains = True
        try:
            while code == _SUCCESS and self._ahead:
                code = super().loop_read(max_packets)
        finally:
            self._drains = False
        return code

    def _create_socket(self) -> paho.SocketLike:
        self._ahead = memoryview(b"")
        made = super()._create_socket()
        if self.over:  # it would put out the link that was made meanwhile
            made.close()
            raise ConnectionAbortedError
        if (frame := getattr(made, "_create_frame", None)) is not None:  # a WebSocket
            made._create_frame = partial(_masked, frame)  # type: ignore[attr-defined]
        return made

    def _sock_recv(self, bufsize: int) -> bytes:
        del self._in_packet["packet"][LARGEST:]
        if not self._ahead:
            if self._drains:
                raise BlockingIOError
            if bufsize >= AHEAD:
                return super()._sock_recv(min(bufsize, PIECE))
            self._ahead = memoryview(super()._sock_recv(AHEAD))
        taken, self._ahead = self._ahead[:bufsize], self._ahead[bufsize:]
        return bytes(taken)

    def _sock_send(self, buf: Any) -> int:
        sent = super()._sock_send(buf)
        if not sent:  # its WebSocket has sent a part and keeps the rest, and paho would forget the packet
            raise BlockingIOError
        return sent

    def _packet_handle(self) -> MQTTErrorCode:
        try:
            return super()._packet_handle()
        except Exception:  # noqa: BLE001 - what is no MQTT would end the thread of an older paho
            return MQTTErrorCode.MQTT_ERR_PROTOCOL

    def _handle_publish(self) -> MQTTErrorCode:
        command, packet = self._in_packet["command"], self._in_packet["packet"]
        numbered = bool(command & 0x02)
        topic_end = 2 + int.from_bytes(packet[:2], "big")
        begin = _payload_at(packet, topic_end + 2 * numbered, self.protocol == MQTTProtocolVersion.MQTTv5)
        if command & 0x04 or begin > self._in_packet["remaining_length"]:  # QoS 2 would be held, unasked
            return MQTTErrorCode.MQTT_ERR_PROTOCOL
        try:
            topic = packet[2:topic_end].decode()
        except UnicodeDecodeError:
            topic = ""  # no topic of anybody
        if topic and self.told is not None:
            self.told(topic, bytes(memoryview(packet)[begin:]), bool(command & 0x01))
        return self._send_puback(int.from_bytes(packet[topic_end : topic_end + 2], "big")) if numbered else _SUCCESS

    def _packet_queue(self, command: int, packet: Any, mid: int, qos: int, info: Any = None) -> MQTTErrorCode:
        """paho cuts off what is left each time that the socket takes some; of a view that copies nothing."""
        left: Any = memoryview(packet)
        return super()._packet_queue(command, left, mid, qos, info)

    def _send_puback(self, mid: int) -> MQTTErrorCode:
        """Queued by who reads, which writes before it waits: nobody is to be woken."""
        packet = bytes((paho.PUBACK, 2)) + mid.to_bytes(2, "big")
        self._out_packet.append(
            {"command": paho.PUBACK, "mid": mid, "qos": 1, "pos": 0, "to_process": 4, "packet": packet, "info": None}
        )
        self._call_socket_register_write()
        return _SUCCESS

    def _handle_pubackcomp(self, cmd: Any) -> MQTTErrorCode:
        packet = self._in_packet["packet"]
        if len(packet) != 2:  # it says why it was not taken
            return super()._handle_pubackcomp(cmd)
        number = int.from_bytes(packet, "big")
        with self._out_message_mutex:
            if number not in self._out_messages:
                return _SUCCESS
            return self._do_on_publish(number, _TAKEN, _NO_PROPERTIES)


def _masked(
    frame: Callable[[int, bytearray, int], bytearray], opcode: int, data: bytearray, masks: int = 1
) -> bytearray:
    """What ``frame``, of paho's WebSocket, makes of ``data``. It masks byte by byte: 100 ms for a MiB, and leaves the
    answer to a ping unmasked (``masks`` is 0), for which a server ends the connection (RFC 6455, 5.1)."""
    plain = frame(opcode, data, 0)
    head, key = len(plain) - len(data), os.urandom(4)
    mask = np.frombuffer(key * (len(data) // 4 + 1), np.uint8, len(data))
    plain[1] |= 0x80  # it is masked
    return plain[:head] + key + (np.frombuffer(data, np.uint8) ^ mask).tobytes()


def _payload_at(packet: bytearray, begin: int, v5: bool) -> int:
    """Where the payload of a PUBLISH begins, after the properties of MQTT 5, which are at ``begin``; beyond the end of
    one that is cut short."""
    if not v5:
        return begin
    length = packet[begin : begin + 4]
    for place, byte in enumerate(length):  # seven bits each, the last one below 128
        begin += 1 + ((byte & 127) << 7 * place)
        if byte < 128:
            return begin
    return len(packet) + 1
