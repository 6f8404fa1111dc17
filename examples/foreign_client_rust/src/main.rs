//! A client of kafkalite in Rust that knows docs/protocol.md and docs/protocol.json alone.
//!
//! It appends a batch twice, which is stored once, reads it back, and joins a group:
//!
//!     python examples/generate_structs.py docs/protocol.json > examples/foreign_client_rust/src/messages.rs
//!     cargo run --manifest-path examples/foreign_client_rust/Cargo.toml -- 127.0.0.1:9092
//!
//! Variables say how it connects, with Kafka's names: KAFKALITE_CLIENT_SECURITY_PROTOCOL (SSL, SASL_SSL),
//! KAFKALITE_CLIENT_SSL_TRUSTSTORE_LOCATION, KAFKALITE_CLIENT_SSL_KEYSTORE_LOCATION, and
//! KAFKALITE_CLIENT_SASL_USERNAME and KAFKALITE_CLIENT_SASL_PASSWORD for SCRAM-SHA-256.

mod batch;
#[allow(dead_code)]
mod messages;
mod scram;
mod security;
mod wire;

use messages::*;
use ring::rand::{SecureRandom, SystemRandom};
use scram::Scram;
use security::{explain, Login, Security, Stream};
use std::net::TcpStream;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use wire::{write_array, Bytes, Reader, Result, TextMap, Wire};

const MAX_ENVELOPE_BYTES: usize = 4 << 20;
const MAX_PAYLOAD_BYTES: usize = 128 << 20;
/// How a TLS alert begins. As the start of a frame, it is no valid length.
const TLS_ALERT: [u8; 2] = [0x15, 0x03];
const TIMEOUT: Duration = Duration::from_secs(30);

struct Connection {
    stream: Box<dyn Stream>,
    next: i64,
}

impl Connection {
    fn open(address: &str, security: &Security) -> Result<Self> {
        let stream = TcpStream::connect(address).map_err(|error| format!("{address}: {error}"))?;
        stream.set_read_timeout(Some(TIMEOUT)).map_err(|error| error.to_string())?;
        stream.set_write_timeout(Some(TIMEOUT)).map_err(|error| error.to_string())?;
        let mut connection = Connection { stream: security.wrap(stream, address)?, next: 0 };
        let software = ("foreign-rust".to_string(), "1".to_string());
        let request = ApiVersionsRequest { software_name: software.0, software_version: software.1 };
        let (versions, _) = connection.ask(request, &[]).map_err(|error| format!("{address}: {error}"))?;
        let has = |key: i64| versions.apis.iter().any(|api| api.api_key == key && api.min_version <= 0);
        if ![PRODUCE, FETCH, METADATA, CREATE_TOPICS].iter().all(|key| has(*key)) {
            return Err("the server lacks an API".into());
        }
        if let Some(login) = &security.login {
            connection.log_in(login).map_err(|error| format!("{address}: {error}"))?;
        }
        Ok(connection)
    }

    fn log_in(&mut self, login: &Login) -> Result<()> {
        self.ask(SaslHandshakeRequest { mechanism: "SCRAM-SHA-256".into() }, &[])?;
        let mut random = [0; 24];
        SystemRandom::new().fill(&mut random).map_err(|_| "the system has no random numbers")?;
        let mut scram = Scram::new(&login.user, &login.password, scram::encode(&random))?;
        let mut send = |text: String| -> Result<Vec<u8>> {
            let request = SaslAuthenticateRequest { auth_bytes: Bytes(text.into_bytes()) };
            Ok(self.ask(request, &[])?.0.auth_bytes.0)
        };
        let server_first = send(scram.first_message())?;
        let server_final = send(scram.final_message(&server_first)?)?;
        scram.check(&server_final)
    }

    /// Send one request and return its response and payload. An error of the whole request is an Err.
    fn ask<Q: Request>(&mut self, request: Q, payload: &[u8]) -> Result<(Q::Response, Vec<u8>)> {
        let number = self.next;
        self.next = (number + 1) % (1 << 31);
        let mut envelope = Vec::new();
        write_array(5, &mut envelope);
        Q::KEY.write(&mut envelope);
        0i64.write(&mut envelope);
        number.write(&mut envelope);
        "foreign-rust".to_string().write(&mut envelope);
        request.write(&mut envelope);
        let lengths = [(envelope.len() as u32).to_be_bytes(), (payload.len() as u32).to_be_bytes()].concat();
        let written = self.stream.write_all(&[&lengths[..], &envelope, payload].concat());
        written.and_then(|_| self.stream.flush()).map_err(|error| explain(&error))?;
        let header = self.receive(8)?;
        if header.starts_with(&TLS_ALERT) {
            return Err("the server speaks TLS (check security.protocol)".into());
        }
        let envelope_bytes = u32::from_be_bytes(header[..4].try_into().unwrap()) as usize;
        let payload_bytes = u32::from_be_bytes(header[4..].try_into().unwrap()) as usize;
        if envelope_bytes == 0 || envelope_bytes > MAX_ENVELOPE_BYTES || payload_bytes > MAX_PAYLOAD_BYTES {
            return Err(format!("a response of {envelope_bytes} and {payload_bytes} bytes"));
        }
        let (envelope, payload) = (self.receive(envelope_bytes)?, self.receive(payload_bytes)?);
        let mut reader = Reader::new(&envelope);
        reader.fields(3, "a response")?;
        let (answered, _throttle_ms) = (i64::read(&mut reader)?, i64::read(&mut reader)?);
        if answered != number {
            return Err(format!("a response to {answered}, not to {number}"));
        }
        if reader.peek_array() == Some(2) {
            reader.fields(2, "an error")?;
            let (code, text) = (i64::read(&mut reader)?, Option::<String>::read(&mut reader)?);
            return Err(format!("API {} failed: {}: {}", Q::KEY, error_name(code), text.unwrap_or_default()));
        }
        let response = Q::Response::read(&mut reader)?;
        reader.end()?;
        Ok((response, payload))
    }

    fn receive(&mut self, length: usize) -> Result<Vec<u8>> {
        let mut data = vec![0; length];
        self.stream.read_exact(&mut data).map_err(|error| explain(&error))?;
        Ok(data)
    }
}

fn check(code: i64, what: &str) -> Result<()> {
    match code {
        NONE => Ok(()),
        _ => Err(format!("{what}: {}", error_name(code))),
    }
}

fn text(bytes: &Option<Vec<u8>>) -> String {
    bytes.as_ref().map_or("null".into(), |found| String::from_utf8_lossy(found).into_owned())
}

/// Append a batch twice with the same sequences, and read it back.
fn produce_and_fetch(connection: &mut Connection, topic: &str) -> Result<()> {
    let asked = InitProducerIdRequest {
        transactional_id: None,
        transaction_timeout_ms: 60_000,
        producer_id: -1,
        producer_epoch: -1,
    };
    let (producer, _) = connection.ask(asked, &[])?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_err(|error| error.to_string())?.as_millis() as i64;
    let cell = |value: &str| Some(value.as_bytes().to_vec());
    let sent = [(now, cell("CA"), cell("maple")), (now + 1, None, cell("glazed")), (now + 2, cell("US"), None)];
    let batch = batch::build(&sent, (producer.producer_id, producer.producer_epoch as i16, 0));
    let mut offsets = Vec::new();
    for _ in 0..2 {
        let part =
            ProducePartition { topic: topic.into(), partition: 0, length_bytes: batch.len() as i64 };
        let request =
            ProduceRequest { acks: -1, timeout_ms: 30_000, transactional_id: None, partitions: vec![part] };
        let (response, _) = connection.ask(request, &batch)?;
        check(response.partitions[0].error_code, "Produce")?;
        offsets.push(response.partitions[0].base_offset);
    }
    if offsets[0] != offsets[1] {
        return Err(format!("the repetition was appended: {offsets:?}"));
    }
    let part = FetchPartition {
        topic: topic.into(),
        partition: 0,
        current_leader_epoch: -1,
        fetch_offset: offsets[0],
        max_bytes: 1 << 20,
    };
    let request = FetchRequest {
        max_wait_ms: 500,
        min_bytes: 1,
        max_bytes: 1 << 20,
        isolation_level: 1,
        partitions: vec![part],
    };
    let (response, payload) = connection.ask(request, &[])?;
    check(response.partitions[0].error_code, "Fetch")?;
    let records = batch::read_all(&payload)?;
    let found: Vec<_> = records.iter().map(|(_, record)| record.clone()).collect();
    if found != sent || records[0].0 != offsets[0] || response.partitions[0].high_watermark != offsets[0] + 3 {
        return Err(format!("sent {sent:?}, fetched {records:?}"));
    }
    for (offset, (time, key, value)) in &records {
        println!("{topic}-0-{offset} {time} {} {}", text(key), text(value));
    }
    Ok(())
}

/// Join a group, receive the partition, commit an offset, and leave.
fn use_a_group(bootstrap: &mut Connection, topic: &str, security: &Security) -> Result<()> {
    let group = format!("{topic}-group");
    let asked = || FindCoordinatorRequest { key_type: 0, keys: vec![group.clone()] };
    let mut found = bootstrap.ask(asked(), &[])?.0.coordinators.remove(0);
    for _ in 0..200 {
        if found.error_code == NONE {
            break;
        }
        std::thread::sleep(Duration::from_millis(50)); // a coordinator is being made
        found = bootstrap.ask(asked(), &[])?.0.coordinators.remove(0);
    }
    check(found.error_code, "FindCoordinator")?;
    let internal = MetadataRequest { topics: Some(vec!["__consumer_offsets".into()]), allow_auto_topic_creation: false };
    let count = bootstrap.ask(internal, &[])?.0.topics[0].partitions.len() as u32;
    if i64::from((batch::murmur2(group.as_bytes()) & 0x7fff_ffff) % count) != found.partition {
        return Err("the group hashes to another partition".into());
    }
    let mut coordinator = Connection::open(&found.address, security)?;
    let member = format!("{:032x}", std::process::id());
    let beat = |epoch: i64, owned: Option<Vec<AssignedTopic>>| ConsumerGroupHeartbeatRequest {
        group_id: group.clone(),
        member_id: member.clone(),
        member_epoch: epoch,
        instance_id: None,
        rebalance_timeout_ms: if epoch == 0 { 60_000 } else { -1 },
        subscribed_topics: (epoch == 0).then(|| vec![topic.to_string()]),
        subscribed_pattern: None,
        assignor: None,
        owned,
        max_wait_ms: 0,
    };
    let (joined, _) = coordinator.ask(beat(0, None), &[])?;
    let assigned = joined.assignment.clone().ok_or("a member that joined has no assignment")?;
    let (beaten, _) = coordinator.ask(beat(joined.member_epoch, Some(assigned.clone())), &[])?;
    let offset = CommittedOffset {
        topic: topic.into(),
        partition: 0,
        offset: 3,
        leader_epoch: -1,
        metadata: None,
        commit_ms: -1,
        topic_id: String::new(),
        error_code: 0,
        error_message: None,
    };
    let commit = OffsetCommitRequest {
        group_id: group.clone(),
        member_id: member.clone(),
        member_epoch: beaten.member_epoch,
        instance_id: None,
        offsets: vec![offset],
    };
    check(coordinator.ask(commit, &[])?.0.offsets[0].error_code, "OffsetCommit")?;
    coordinator.ask(beat(-1, None), &[])?;
    println!("{group} had {topic} {:?}, committed 3", assigned[0].partitions);
    Ok(())
}

fn run(address: &str, topic: &str) -> Result<()> {
    let security = Security::from_environment()?;
    let mut connection = Connection::open(address, &security)?;
    let new = NewTopic {
        name: topic.into(),
        num_partitions: 1,
        replication_factor: -1,
        configs: TextMap(vec![("retention.ms".into(), "86400000".into())]),
    };
    let create = CreateTopicsRequest { timeout_ms: 30_000, validate_only: false, topics: vec![new] };
    let created = connection.ask(create, &[])?.0.topics.remove(0);
    if created.error_code != TOPIC_ALREADY_EXISTS {
        check(created.error_code, "CreateTopics")?;
    }
    let asked = MetadataRequest { topics: Some(vec![topic.into()]), allow_auto_topic_creation: false };
    let (metadata, _) = connection.ask(asked, &[])?;
    let leader = metadata.topics[0].partitions[0].leader_id;
    let broker = metadata.brokers.iter().find(|broker| broker.node_id == leader).ok_or("no leader")?;
    produce_and_fetch(&mut Connection::open(&broker.address, &security)?, topic)?;
    use_a_group(&mut connection, topic, &security)
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let Some(address) = arguments.first() else {
        eprintln!("usage: foreign-client HOST:PORT [TOPIC]");
        std::process::exit(2);
    };
    let topic = arguments.get(1).map_or("foreign-rust", String::as_str);
    if let Err(error) = run(address, topic) {
        eprintln!("foreign-client: {error}");
        std::process::exit(1);
    }
}
