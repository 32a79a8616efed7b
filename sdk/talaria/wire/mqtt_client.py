"""paho's client, which holds no more of a message than says anything to us, and copies its payload once."""

from __future__ import annotations

import paho.mqtt.client as paho
from paho.mqtt.enums import MQTTErrorCode, MQTTProtocolVersion

from talaria.wire.frames import MAX_FRAME

LARGEST, PIECE = MAX_FRAME + (1 << 16) + 1280, 1 << 18
"""Bytes of a packet that are held at most, so that no frame on any topic is cut, and those that are read at once."""


class Client(paho.Client):
    """What is beyond the largest packet that says anything to us is read and forgotten, not held: a broker, or whoever
    may publish there, can send 256 MiB at once. What is left of it is no frame, and is acknowledged as any other. A
    payload is copied once: paho, which takes a packet apart by four copies of all that is left, sees none of it."""

    payload = b""
    """Of the message that is being told."""
    over = False
    """Whether nobody waits any more for the connection that is being made."""

    def let_go(self) -> None:
        """Close what wakes the network thread, which has ended: paho leaves that to the garbage collector."""
        self._reset_sockets(sockpair_only=True)

    def _create_socket(self) -> paho.SocketLike:
        made = super()._create_socket()
        if self.over:  # it would put out the link that was made meanwhile
            made.close()
            raise ConnectionAbortedError
        return made

    def _sock_recv(self, bufsize: int) -> bytes:
        del self._in_packet["packet"][LARGEST:]
        return super()._sock_recv(min(bufsize, PIECE))

    def _packet_handle(self) -> MQTTErrorCode:
        try:
            return super()._packet_handle()
        except Exception:  # noqa: BLE001 - what is no MQTT would end the thread of an older paho
            return MQTTErrorCode.MQTT_ERR_PROTOCOL

    def _handle_publish(self) -> MQTTErrorCode:
        if self._in_packet["command"] & 0x04:  # QoS 2, which nobody asked for: held until the broker says so
            return MQTTErrorCode.MQTT_ERR_PROTOCOL
        packet = self._in_packet["packet"]
        numbered, v5 = bool(self._in_packet["command"] & 0x02), self.protocol == MQTTProtocolVersion.MQTTv5
        begin = _payload_at(packet, numbered, v5)
        self.payload, self._in_packet["packet"] = bytes(memoryview(packet)[begin:]), packet[:begin]
        try:
            return super()._handle_publish()
        finally:
            self.payload = b""


def _payload_at(packet: bytearray, numbered: bool, v5: bool) -> int:
    """Where the payload of a PUBLISH begins, after its topic, its packet's number and the properties of MQTT 5; at the
    end of one that is cut short."""
    begin = 2 + int.from_bytes(packet[:2], "big") + 2 * numbered
    if v5:
        length = packet[begin : begin + 4]
        for place, byte in enumerate(length):  # seven bits each, the last one below 128
            begin += 1 + ((byte & 127) << 7 * place)
            if byte < 128:
                break
    return min(begin, len(packet))
