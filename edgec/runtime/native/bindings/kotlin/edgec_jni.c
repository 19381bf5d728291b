/* The JNI half of Edgec.kt. Text crosses as byte arrays turned into String by Java: JNI's own "UTF-8" is not UTF-8. */
#include <jni.h>
#include <stdlib.h>
#include <string.h>

#include "edgec.h"

static void throw_status(JNIEnv* env, edgec_status status) {
  jclass type = (*env)->FindClass(env, "dev/edgec/EdgecException");
  jmethodID make = (*env)->GetMethodID(env, type, "<init>", "(ILjava/lang/String;)V");
  jstring message = (*env)->NewStringUTF(env, edgec_last_error());
  (*env)->Throw(env, (jthrowable)(*env)->NewObject(env, type, make, (jint)status, message));
}

/* String.getBytes("UTF-8") as malloc'ed memory, ending in NUL; NULL when an exception is pending. */
static char* to_utf8(JNIEnv* env, jstring text, size_t* bytes) {
  jclass type = (*env)->GetObjectClass(env, text);
  jmethodID get = (*env)->GetMethodID(env, type, "getBytes", "(Ljava/lang/String;)[B");
  jbyteArray array = (jbyteArray)(*env)->CallObjectMethod(env, text, get, (*env)->NewStringUTF(env, "UTF-8"));
  if ((*env)->ExceptionCheck(env)) return NULL;
  *bytes = (size_t)(*env)->GetArrayLength(env, array);
  char* out = malloc(*bytes + 1);
  if (out == NULL) return NULL;
  (*env)->GetByteArrayRegion(env, array, 0, (jsize)*bytes, (jbyte*)out);
  out[*bytes] = '\0';
  return out;
}

static jstring from_utf8(JNIEnv* env, const char* text, int32_t bytes) {
  jbyteArray array = (*env)->NewByteArray(env, bytes);
  (*env)->SetByteArrayRegion(env, array, 0, bytes, (const jbyte*)text);
  jclass type = (*env)->FindClass(env, "java/lang/String");
  jmethodID make = (*env)->GetMethodID(env, type, "<init>", "([BLjava/lang/String;)V");
  return (jstring)(*env)->NewObject(env, type, make, array, (*env)->NewStringUTF(env, "UTF-8"));
}

JNIEXPORT jlong JNICALL Java_dev_edgec_Edgec_create(JNIEnv* env, jclass self, jstring bundle, jint threads,
                                                    jlong budget) {
  (void)self;
  size_t bytes = 0;
  char* path = to_utf8(env, bundle, &bytes);
  if (path == NULL) return 0;
  edgec_engine_options options = EDGEC_ENGINE_OPTIONS_INIT;
  options.threads = threads;
  options.memory_budget = (uint64_t)budget;
  edgec_engine* engine = NULL;
  const edgec_status status = edgec_engine_create(path, &options, &engine);
  free(path);
  if (status != EDGEC_OK) throw_status(env, status);
  return (jlong)(intptr_t)engine;
}

JNIEXPORT void JNICALL Java_dev_edgec_Edgec_destroy(JNIEnv* env, jclass self, jlong handle) {
  (void)env;
  (void)self;
  edgec_engine_destroy((edgec_engine*)(intptr_t)handle);
}

JNIEXPORT jlong JNICALL Java_dev_edgec_Edgec_submit(JNIEnv* env, jclass self, jlong handle, jstring prompt,
                                                    jint max_tokens, jfloat temperature, jlong seed, jboolean special) {
  (void)self;
  edgec_engine* engine = (edgec_engine*)(intptr_t)handle;
  size_t bytes = 0;
  char* text = to_utf8(env, prompt, &bytes);
  if (text == NULL) return 0;
  int32_t count = 0;
  int32_t* tokens = malloc(sizeof(int32_t) * (bytes + 1));
  edgec_status status = tokens == NULL ? EDGEC_OVER_BUDGET
                                       : edgec_tokenizer_encode(edgec_engine_tokenizer(engine), text, bytes,
                                                                special ? 1 : 0, tokens, (int32_t)bytes + 1, &count);
  uint64_t id = 0;
  if (status == EDGEC_OK) {
    edgec_request request;
    memset(&request, 0, sizeof(request));
    const edgec_sampling sampling = EDGEC_SAMPLING_INIT;
    request.struct_size = sizeof(request);
    request.tokens = tokens;
    request.token_count = count;
    request.sampling = sampling;
    request.sampling.max_tokens = max_tokens;
    request.sampling.temperature = temperature;
    request.sampling.seed = (uint64_t)seed;
    request.sampling.has_seed = seed != 0;
    status = edgec_engine_submit(engine, &request, &id);
  }
  free(tokens);
  free(text);
  if (status != EDGEC_OK) throw_status(env, status);
  return (jlong)id;
}

JNIEXPORT void JNICALL Java_dev_edgec_Edgec_cancel(JNIEnv* env, jclass self, jlong handle, jlong request) {
  (void)self;
  const edgec_status status = edgec_engine_cancel((edgec_engine*)(intptr_t)handle, (uint64_t)request);
  if (status != EDGEC_OK && status != EDGEC_NOT_FOUND) throw_status(env, status);
}

JNIEXPORT jint JNICALL Java_dev_edgec_Edgec_step(JNIEnv* env, jclass self, jlong handle) {
  (void)self;
  int32_t outcome = 0;
  const edgec_status status = edgec_engine_step((edgec_engine*)(intptr_t)handle, &outcome);
  if (status != EDGEC_OK) throw_status(env, status);
  return outcome;
}

JNIEXPORT jobjectArray JNICALL Java_dev_edgec_Edgec_poll(JNIEnv* env, jclass self, jlong handle) {
  (void)self;
  edgec_event events[64];
  int32_t count = 0;
  const edgec_status status = edgec_engine_poll((edgec_engine*)(intptr_t)handle, events, 64, &count);
  if (status != EDGEC_OK) {
    throw_status(env, status);
    return NULL;
  }
  jclass type = (*env)->FindClass(env, "dev/edgec/EdgecEvent");
  jmethodID make = (*env)->GetMethodID(env, type, "<init>", "(JIIILjava/lang/String;)V");
  jobjectArray out = (*env)->NewObjectArray(env, count, type, NULL);
  for (int32_t i = 0; i < count; ++i) {
    jstring text = from_utf8(env, events[i].text, events[i].text_bytes);
    jobject event = (*env)->NewObject(env, type, make, (jlong)events[i].request, (jint)events[i].sequence,
                                      (jint)events[i].token, (jint)events[i].finish, text);
    (*env)->SetObjectArrayElement(env, out, i, event);
    (*env)->DeleteLocalRef(env, event);
    (*env)->DeleteLocalRef(env, text);
  }
  return out;
}

JNIEXPORT void JNICALL Java_dev_edgec_Edgec_trim(JNIEnv* env, jclass self, jlong handle, jint level) {
  (void)self;
  const edgec_status status = edgec_engine_trim((edgec_engine*)(intptr_t)handle, level);
  if (status != EDGEC_OK) throw_status(env, status);
}
