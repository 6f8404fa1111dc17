//! Record batches without compression (section 5), CRC-32C and murmur2.

use crate::wire::{write_array, Bytes, Reader, Result, Wire};

pub const HEADER_BYTES: usize = 61;
pub type Record = (i64, Option<Vec<u8>>, Option<Vec<u8>>); // timestamp, key, value

pub fn crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(!0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg()))
    })
}

pub fn murmur2(data: &[u8]) -> u32 {
    const M: u32 = 0x5bd1_e995;
    let mut hash = 0x9747_b28c ^ data.len() as u32;
    let words = data.chunks_exact(4);
    let rest = words.remainder();
    for word in words {
        let mut k = u32::from_le_bytes(word.try_into().unwrap()).wrapping_mul(M);
        k = (k ^ (k >> 24)).wrapping_mul(M);
        hash = hash.wrapping_mul(M) ^ k;
    }
    if !rest.is_empty() {
        let tail = rest.iter().rev().fold(0, |number, byte| number << 8 | u32::from(*byte));
        hash = (hash ^ tail).wrapping_mul(M);
    }
    hash = (hash ^ (hash >> 13)).wrapping_mul(M);
    hash ^ (hash >> 15)
}

fn write_column(cells: &[Option<Vec<u8>>], out: &mut Vec<u8>) {
    if cells.iter().all(Option::is_none) {
        return out.push(0xc0);
    }
    let (mut offsets, mut data, mut valid) = (vec![0; 4], Vec::new(), vec![0u8; cells.len().div_ceil(8)]);
    for (number, cell) in cells.iter().enumerate() {
        if let Some(bytes) = cell {
            data.extend(bytes);
            valid[number / 8] |= 1 << (number % 8);
        }
        offsets.extend((data.len() as i32).to_le_bytes());
    }
    write_array(3, out);
    Bytes(offsets).write(out);
    Bytes(data).write(out);
    cells.iter().any(Option::is_none).then_some(Bytes(valid)).write(out);
}

fn read_column(from: &mut Reader, count: usize) -> Result<Vec<Option<Vec<u8>>>> {
    if from.nil() {
        return Ok(vec![None; count]);
    }
    from.fields(3, "a column")?;
    let (offsets, data, valid) = (Bytes::read(from)?.0, Bytes::read(from)?.0, Option::<Bytes>::read(from)?);
    let ends: Vec<usize> =
        offsets.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()) as usize).collect();
    let rises = ends.windows(2).all(|pair| pair[0] <= pair[1]);
    let is_whole = ends.len() == count + 1 && ends[0] == 0 && ends[count] == data.len();
    if !rises || !is_whole || valid.as_ref().is_some_and(|bits| bits.0.len() != count.div_ceil(8)) {
        return Err(format!("a column of {count} that does not fit its data"));
    }
    let is_valid = |at: usize| valid.as_ref().is_none_or(|bits| bits.0[at / 8] >> (at % 8) & 1 == 1);
    Ok((0..count).map(|at| is_valid(at).then(|| data[ends[at]..ends[at + 1]].to_vec())).collect())
}

/// Return a batch of an idempotent producer: (id, epoch, first sequence).
pub fn build(records: &[Record], producer: (i64, i16, i32)) -> Vec<u8> {
    let base = records[0].0;
    let mut body = Vec::new();
    write_array(4, &mut body);
    Bytes(records.iter().flat_map(|record| (record.0 - base).to_le_bytes()).collect()).write(&mut body);
    write_column(&records.iter().map(|record| record.1.clone()).collect::<Vec<_>>(), &mut body);
    write_column(&records.iter().map(|record| record.2.clone()).collect::<Vec<_>>(), &mut body);
    body.push(0xc0); // no headers
    let count = records.len() as i32;
    let mut covered = Vec::new(); // by the CRC
    covered.extend(7i16.to_be_bytes()); // columns, no compression
    covered.extend((count - 1).to_be_bytes());
    covered.extend(base.to_be_bytes());
    covered.extend(records.iter().map(|record| record.0).max().unwrap().to_be_bytes());
    covered.extend(producer.0.to_be_bytes());
    covered.extend(producer.1.to_be_bytes());
    covered.extend(producer.2.to_be_bytes());
    covered.extend(count.to_be_bytes());
    covered.extend(body);
    let mut batch = vec![0; 8];
    batch.extend((covered.len() as i32 + 9).to_be_bytes());
    batch.extend((-1i32).to_be_bytes());
    batch.push(2);
    batch.extend(crc32c(&covered).to_be_bytes());
    batch.extend(covered);
    batch
}

fn number(data: &[u8], at: usize, width: usize) -> i64 {
    let sign = if data[at] & 0x80 != 0 { -1i64 } else { 0 };
    data[at..at + width].iter().fold(sign, |found, byte| found << 8 | i64::from(*byte))
}

/// Return (offset, record) of consecutive batches. Control batches are skipped.
pub fn read_all(mut data: &[u8]) -> Result<Vec<(i64, Record)>> {
    let mut found = Vec::new();
    while !data.is_empty() {
        if data.len() < HEADER_BYTES {
            return Err("a batch is cut off".into());
        }
        let length = 12 + number(data, 8, 4) as usize;
        if length < HEADER_BYTES || length > data.len() || data[16] != 2 {
            return Err(format!("no batch of {length} bytes"));
        }
        let batch = &data[..length];
        data = &data[length..];
        if number(batch, 17, 4) as u32 != crc32c(&batch[21..]) {
            return Err("a wrong CRC".into());
        }
        let (base_offset, attributes) = (number(batch, 0, 8), number(batch, 21, 2));
        let (base, largest) = (number(batch, 27, 8), number(batch, 35, 8));
        let count = number(batch, 57, 4) as usize;
        if attributes & 32 != 0 {
            continue;
        }
        if attributes & 0x0707 != 7 {
            return Err("compressed, or rows of Kafka".into());
        }
        let mut body = Reader::new(&batch[HEADER_BYTES..]);
        body.fields(4, "a body")?;
        let deltas = Option::<Bytes>::read(&mut body)?.map(|bytes| bytes.0);
        let times: Vec<i64> = match &deltas {
            None => vec![base; count],
            Some(bytes) if bytes.len() == 8 * count => bytes
                .chunks_exact(8)
                .map(|each| base + i64::from_le_bytes(each.try_into().unwrap()))
                .collect(),
            Some(bytes) if bytes.len() == 4 * count => {
                let widen = |each: &[u8]| i64::from(i32::from_le_bytes(each.try_into().unwrap()));
                bytes.chunks_exact(4).map(|each| base + widen(each)).collect()
            }
            Some(bytes) => return Err(format!("{} bytes of timestamps", bytes.len())),
        };
        let (keys, values) = (read_column(&mut body, count)?, read_column(&mut body, count)?);
        for (at, (key, value)) in keys.into_iter().zip(values).enumerate() {
            let time = if attributes & 8 != 0 { largest } else { times[at] };
            found.push((base_offset + at as i64, (time, key, value)));
        }
    }
    Ok(found)
}
